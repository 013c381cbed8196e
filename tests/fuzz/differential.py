"""Differential fuzzer: the engine against stock transformers, on the same random tiny checkpoint.

A case is a family with an odd configuration, a draft, a policy, a budget and a few greedy requests. The tokens must be
those of `generate` and the text that of the tokenizer. `python tests/fuzz/differential.py --seconds 600 --seed 1` runs
for as long as asked; the test suite runs a few cases. A failure is made smaller and printed as a command that runs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedTokenizerFast

from spmoe import LLM, SamplingParams, types
from spmoe.draft.base import DraftContext, Drafter, Observers
from spmoe.engine import build
from spmoe.errors import UsageError
from spmoe.models.checkpoint import quiet
from spmoe.models.experts_seam import experts_modules
from spmoe.models.families import VOCABULARY, families, save, tiny_config, tiny_draft, tiny_model
from spmoe.registry import DRAFTERS, EVICTION_POLICIES, PREFETCH_POLICIES

TIE = 1e-4  # logits that are nearer than this may change order with the shape of a batch, in float32
LOGPROB_TOLERANCE = 1e-3
MAX_SHRINKS = 60  # runs that make a failing case smaller
_REFUSED = (  # drafts that the engine refuses with reason
    "keeps a state that cannot be rolled back",  # as a copy of such a target does
    "the draft's tokenizer differs",  # transformers adds tokens to those of some model types
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


# ---- cases


@dataclass(frozen=True)
class Case:
    """One comparison, self-contained: everything that is drawn is in here. Plain values only."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)  # of config.json, instead of the tiny configuration's
    weights: int = 0  # seed
    tokenizer: str = "none"  # or byte-level, byte-fallback
    # a drafter's name, or: random (a dense model), copy (the target with noise), mostly-right (see MostlyRight)
    draft: str = "none"
    noise: float = 0.05  # of the copy, relative to the weights
    slots: float = 1.0  # 0: the least possible, 1: all experts
    options: dict[str, Any] = field(default_factory=dict)  # of the engine
    changes: list[dict[str, Any]] = field(default_factory=list)  # of options, each followed by the same requests
    requests: list[dict[str, Any]] = field(default_factory=lambda: [{"prompt": [5]}])  # prompt and SamplingParams
    interleaved: bool = False  # the requests run in turns, step by step

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a case as `str` writes it."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        default = type(self)(self.family)
        return json.dumps({k: v for k, v in asdict(self).items() if k == "family" or v != getattr(default, k)})


class Outcome(NamedTuple):
    """Result of a case."""

    kind: str  # equal, different, error; tie and unstable: see `_classify`; rejected, by transformers
    detail: str = ""
    tokens: int = 0  # compared

    @property
    def failed(self) -> bool:
        return self.kind in ("different", "error")


# ---- drawing: settings of config.json

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_GROUPS = ("n_group", "num_expert_group")
_SWITCHES = (  # flipped
    *("attention_bias", "mlp_bias", "norm_topk_prob", "moe_renormalize", "tie_word_embeddings", "use_qk_norm"),
    *("qkv_bias", "use_bias", "lm_head_bias", "use_expert_bias", "rope_interleave", "use_sliding_window"),
    *("attention_k_eq_v", "use_double_wide_mlp", "moe_apply_router_weight_on_input", "mup_enabled", "gating"),
    *("mamba_conv_bias", "mamba_proj_bias", "conv_bias", "use_conv_bias", "shared_expert_sink"),
)
_VALUES: Mapping[str, Sequence[Any]] = {
    "num_hidden_layers": (1, 2, 4),
    "hidden_size": (16, 48),
    "head_dim": (4, 16),
    "intermediate_size": (4, 20, 36),
    "moe_intermediate_size": (4, 12, 36),
    "shared_expert_intermediate_size": (8, 36),
    "shared_intermediate_size": (8, 36),
    "n_shared_experts": (1, 2, 3),
    "num_shared_experts": (1, 2, 3),
    "moe_num_shared_experts": (1, 3),
    "first_k_dense_replace": (0, 2),
    "num_dense_layers": (0, 2),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], [1], [0, 2]),
    "sliding_window": (2, 5, None),  # a window of 1 keeps all keys in transformers' cache: [-0:]
    "q_lora_rank": (8, None),
    "hidden_act": ("gelu", "relu"),
    "routed_scaling_factor": (0.5, 1.0, 2.5),
    "route_scale": (0.5, 2.0),
    "router_scaling_factor": (0.5, 1.0),
    "final_logit_softcapping": (5.0, 30.0),
    "logits_scaling": (0.5, 2.0),
    "residual_multiplier": (0.5, 2.0),
    "attention_multiplier": (0.3, 2.0),
    "embedding_multiplier": (0.5, 2.0),
    "clip_qkv": (0.5,),
    "swiglu_limit": (1.0,),
    "rms_norm_eps": (1e-2,),
    "hidden_size_per_layer_input": (0, 16),
    "num_kv_shared_layers": (0, 1),
    "linear_conv_kernel_dim": (2, 3),
    "max_position_embeddings": (64, 512),
    "expert_selection_fn": ("softmax", "sigmoid"),
}
_ROPE: Sequence[dict[str, Any]] = (
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)


@cache
def known_families() -> list[str]:
    """Return every MoE family of the installed transformers."""
    return sorted(families())


def _accepts(family: str, settings: Mapping[str, Any]) -> bool:
    """Return whether transformers builds such a model with experts, runs it, and gets finite logits."""
    try:
        with quiet(), torch.inference_mode():
            model = tiny_model(family, 0, **settings)
            return bool(model(torch.tensor([[5, 6, 7]])).logits.isfinite().all())
    except Exception:  # of any family
        return False


def draw_settings(rng: random.Random, family: str) -> dict[str, Any]:
    """Draw an odd configuration that transformers accepts."""
    known = tiny_config(family).to_dict()
    found: dict[str, Any] = {}
    for _ in range(rng.choice((0, 1, 2, 3, 5))):
        changed = {**found, **_draw_change(rng, known)}
        if _accepts(family, changed):
            found = changed
    return found


def _draw_change(rng: random.Random, known: Mapping[str, Any]) -> dict[str, Any]:
    experts, top_k, groups = ([name for name in names if name in known] for names in (_EXPERTS, _TOP_K, _GROUPS))
    kinds = [name for name in _SWITCHES if isinstance(known.get(name), bool)]
    kinds += [name for name in _VALUES if name in known]
    kinds += [name for name in ("layer_types", "mlp_layer_types") if isinstance(known.get(name), list)]
    kinds += ["experts"] * 4 + ["heads"] * 2
    if "rope_type" in (known.get("rope_parameters") or {}):
        kinds += ["rope"] * 2
    match kind := rng.choice(kinds):
        case "experts":
            number = rng.choice((1, 2, 3, 5, 8, 13))
            taken = rng.choice((1, min(2, number), number))
            group = {name: 1 for name in (*groups, "topk_group") if known.get(name) is not None}
            return {**dict.fromkeys(experts, number), **dict.fromkeys(top_k, taken), **group}
        case "heads":
            heads, kv_heads = rng.choice(((1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (6, 3)))
            if known.get("num_key_value_heads") == known.get("num_attention_heads"):
                kv_heads = heads
            return {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        case "rope":
            return {"rope_parameters": {**known["rope_parameters"], **rng.choice(_ROPE)}}
        case "layer_types" | "mlp_layer_types":
            return {kind: [rng.choice(known[kind]) for _ in known[kind]]}
        case _ if kind in _VALUES:
            return {kind: rng.choice(_VALUES[kind])}
    return {kind: not known[kind]}


# ---- drawing: the engine and requests


def draw_case(seed: int, number: int) -> Case:
    """Draw a case; equal for equal arguments."""
    rng = random.Random(f"{seed}:{number}")
    family = rng.choice(known_families())
    tokenizer = rng.choice(("none", "none", "byte-level", "byte-fallback"))
    drafts = ("none", "ngram", "self:int8", "self:int4", "random", "copy", "copy", "mostly-right", "mostly-right")
    return Case(
        family,
        draw_settings(rng, family),
        weights=rng.randrange(10**6),
        tokenizer=tokenizer,
        draft=rng.choice(drafts),
        noise=rng.choice((0.01, 0.05, 0.2)),
        slots=rng.choice((0.0, 0.0, 0.1, 0.3, 0.6, 1.0)),
        options={
            **_draw_changeable(rng),
            "prefill_chunk": rng.choice((1, 2, 3, 7, 512)),
            **rng.choice(({}, {}, {}, {"max_model_len": rng.choice((12, 24))}, {"link_gbps": 5.0})),
        },
        changes=[_draw_changeable(rng) for _ in range(rng.choice((0, 1, 2)))],
        requests=[_draw_request(rng, tokenizer) for _ in range(rng.choice((1, 1, 2, 3)))],
        interleaved=rng.random() < 0.3,
    )


def _draw_changeable(rng: random.Random) -> dict[str, Any]:
    """Draw options that may change while an engine runs."""
    policies = [name for name in PREFETCH_POLICIES.names() if name != "oracle"]
    prefetch = rng.choice((rng.choice(policies), "draft-gate", "draft-gate+next-gate"))
    return {
        "num_speculative_tokens": rng.choice((0, 1, 1, 2, 3, 4, 5, 8, "auto")),
        "prefetch": prefetch,
        "cutoff": rng.choice(("all", "all", "1", "auto", "just-in-time")),
        "eviction": rng.choice(("auto", *EVICTION_POLICIES.names())),
        **rng.choice(({}, {}, {"batching": False}, {"overlap": False})),
    }


def _draw_request(rng: random.Random, tokenizer: str) -> dict[str, Any]:
    length = rng.choice((1, 1, 2, 5, 11, 11, 40))
    partial = tokenizer == "none" or rng.random() < 0.3  # parts of characters occur too
    known = [token for token in range(3, VOCABULARY) if partial or token not in _PARTIAL]
    prompt = [rng.choice(known) for _ in range(length)]
    if rng.random() < 0.3:  # repeated text, for n-grams
        prompt = (prompt[:4] * length)[:length]
    if tokenizer != "none" and rng.random() < 0.5:
        prompt += rng.choice(_SPELLED)
    request: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.choice((1, 2, 5, 12, 12, 24)),
        "ignore_eos": rng.random() < 0.7,
    }
    for name, values in {
        "repetition_penalty": (0.7, 1.3),
        "presence_penalty": (-0.5, 1.0),
        "frequency_penalty": (-0.5, 0.8),
        "stop_token_ids": (rng.sample(range(VOCABULARY), 6),),
        "logit_bias": ({str(rng.randrange(VOCABULARY)): rng.choice((-100.0, -2.0, 1.5)) for _ in range(4)},),
        "logprobs": (0, 3),
    }.items():
        if rng.random() < 0.15:
            request[name] = rng.choice(values)
    if not partial:
        request["logit_bias"] = {str(token): -100.0 for token in _PARTIAL}
    if not request["ignore_eos"] and rng.random() < 0.5:
        request["min_tokens"] = rng.randrange(request["max_tokens"] + 1)
    return request


# ---- tokenizers: three special tokens, words, single bytes

_CHARACTERS = ("\N{PARTY POPPER}", "\N{GRINNING FACE}", "\u20ac", "\u00e9")
_BYTES = [*sorted({byte for one in _CHARACTERS for byte in one.encode()}), *b"AZ~ \n"]
_WORDS = [f"{a}{b}" for a in ("\u2581", "", "\u2581x") for b in "abcdefghijklmnopqrstuvwxyz0123456789"]
_FIRST = 3  # token of the first byte
_SPELLED = [[_FIRST + _BYTES.index(byte) for byte in text.encode()] for text in (*_CHARACTERS, "".join(_CHARACTERS))]
_PARTIAL = [_FIRST + index for index, byte in enumerate(_BYTES) if byte >= 0x80]  # tokens of a part of a character


@cache
def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the model's vocabulary with the decoder of GPT-2 or of Llama and Mixtral."""
    special = ["<pad>", "<s>", "</s>"]
    if kind == "byte-fallback":
        symbols = [*special, *(f"<0x{byte:02X}>" for byte in _BYTES), *_WORDS][:VOCABULARY]
        core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], byte_fallback=True))
        core.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        shown = [_byte_symbol(byte) for byte in _BYTES]
        words = [spell.pre_tokenize_str(word.replace("\u2581", " "))[0][0] for word in _WORDS]
        symbols = [*special, *shown, *words][:VOCABULARY]
        core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
        core.pre_tokenizer, core.decoder = spell, decoders.ByteLevel()
    assert len(symbols) == len(set(symbols)) == VOCABULARY
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _byte_symbol(byte: int) -> str:
    """Return the character that stands for a byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [one for one in range(256) if one not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


# ---- a drafter with a known answer


@DRAFTERS.register("mostly-right")
class MostlyRight(Drafter):
    """Proposes the tokens of transformers, some of them wrong: drafts are accepted fully, partly and not at all."""

    answers: ClassVar[list[list[int]]] = []  # prompt and output of every request of the case

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        return cls()

    def propose(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        return [types.Draft(self._propose(sequence.tokens, k)) for sequence in sequences]

    def _propose(self, tokens: list[int], k: int) -> list[int]:
        size = len(tokens)
        for answer in self.answers:
            if answer[:size] == tokens:
                near = enumerate(answer[size : size + k], size)
                return [token if (7 * at * at + at) % 5 else (token + 1) % VOCABULARY for at, token in near]
        return []


# ---- running a case


class Expected(NamedTuple):
    """Tokens of transformers, with the processed scores and the raw logits that each was chosen from."""

    tokens: list[int]
    scores: Sequence[Tensor]  # each: [vocabulary]
    logits: Sequence[Tensor]  # each: [vocabulary]


class _AdditivePenalties(LogitsProcessor):
    """Presence and frequency penalties, which transformers does not have."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[-1]).float()
        return scores - self._frequency * counts - self._presence * (counts > 0)


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, directory: Path) -> None:
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._model.set_experts_implementation("eager")

    def generate(self, prompt: list[int], params: SamplingParams, max_new_tokens: int) -> Expected:
        """Generate greedily with these parameters."""
        ends = [*(params.stop_token_ids or ()), *([] if params.ignore_eos else [2])]
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {}
        if params.logit_bias:
            options["sequence_bias"] = {(token,): bias for token, bias in params.logit_bias.items()}
        if params.min_tokens:
            options["min_new_tokens"] = params.min_tokens
        if params.repetition_penalty != 1.0:
            options["repetition_penalty"] = params.repetition_penalty
        if params.presence_penalty or params.frequency_penalty:
            penalties = _AdditivePenalties(len(prompt), params.presence_penalty, params.frequency_penalty)
            options["logits_processor"] = [penalties]
        self._model.generation_config.eos_token_id = ends or None
        with quiet():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
                pad_token_id=0, return_dict_in_generate=True, output_scores=True, output_logits=True, **options,
            )  # fmt: skip
        tokens = output.sequences[0, len(prompt) :].tolist()
        return Expected(tokens, [row[0] for row in output.scores], [row[0] for row in output.logits])

    def expert_memory(self, share: float) -> str:
        """Return the option for a number of slots between one token's experts (0) and all experts (1)."""
        routed: list[int] = []  # experts of a token; some families ignore their setting

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            routed.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).shape[-1])

        modules = [experts for _, experts in experts_modules(self._model)]
        handles = [experts.register_forward_pre_hook(note, with_kwargs=True) for experts in modules]
        self.whole_logits([5])
        for handle in handles:
            handle.remove()
        most = sum(experts.num_experts for experts in modules)
        slots = max(routed) + round(share * (most - max(routed)))
        return f"{min(100.0, 100 * (slots + 0.25) / most):.6f}%"

    @torch.inference_mode()
    def whole_logits(self, tokens: list[int]) -> Tensor:
        """Return the logits after these tokens, read in one forward."""  # [vocabulary]
        logits: Tensor = self._model(torch.tensor([tokens])).logits[0, -1]
        return logits


def run_case(case: Case) -> Outcome:
    """Run a case with transformers and with the engine, and compare."""
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.dict(os.environ, {"SPMOE_HOME": str(Path(directory) / "home")}),
    ):
        try:
            target = _write_target(case, Path(directory))
            reference = Reference(target)
            limit = case.options.get("max_model_len", sys.maxsize)
            expected = [_expect(reference, request, limit) for request in case.requests]
        except Exception as error:
            return Outcome("rejected", f"{type(error).__name__}: {error}")
        if not all(row.isfinite().all() for one in expected for row in one.logits):
            return Outcome("rejected", "the logits are not finite")
        try:
            return _compare_engine(case, target, _write_draft(case, target), reference, expected)
        except UsageError as error:
            if case.draft in ("copy", "random") and any(text in str(error) for text in _REFUSED):
                return run_case(replace(case, draft="mostly-right"))
            return Outcome("error", traceback.format_exc())
        except Exception:
            return Outcome("error", traceback.format_exc())


def _write_target(case: Case, directory: Path) -> Path:
    target = directory / "target"
    save(tiny_model(case.family, case.weights, **case.settings), target)
    _write_tokenizer(case, target)
    return target


def _write_tokenizer(case: Case, directory: Path) -> None:
    if case.tokenizer != "none":
        make_tokenizer(case.tokenizer).save_pretrained(directory)


def _write_draft(case: Case, target: Path) -> str | None:
    """Write the draft's checkpoint, if it has one; return the engine's option."""
    if case.draft == "none":
        return None
    if case.draft not in ("random", "copy"):
        return case.draft
    if case.draft == "random":
        model = tiny_draft(tiny_config(case.family, **case.settings).hidden_size, VOCABULARY, case.weights)
    else:
        model = tiny_model(case.family, case.weights, **case.settings)
        rng = torch.Generator().manual_seed(case.weights)
        with torch.no_grad():
            for tensor in model.parameters():
                scale = case.noise * tensor.std(correction=0)
                tensor.add_(scale * torch.randn(tensor.shape, generator=rng))
    directory = target.parent / "draft"
    save(model, directory)
    _write_tokenizer(case, directory)
    return str(directory)


def _params(request: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: value for name, value in request.items() if name != "prompt"})


def _expect(reference: Reference, request: Mapping[str, Any], max_length: int) -> Expected:
    params, prompt = _params(request), request["prompt"]
    if len(prompt) >= max_length:
        return Expected([], [], [])
    return reference.generate(prompt, params, min(params.max_tokens, max_length - len(prompt)))


def _compare_engine(
    case: Case, target: Path, draft: str | None, reference: Reference, expected: list[Expected]
) -> Outcome:
    """Run the requests with every configuration of the case; return the first difference."""
    runs = [(r, e) for r, e in zip(case.requests, expected, strict=True) if e.tokens]  # others exceed the context
    MostlyRight.answers = [[*request["prompt"], *one.tokens] for request, one in runs]
    doubt, compared = Outcome("equal"), 0
    options = {**case.options, "expert_memory": reference.expert_memory(case.slots), "dtype": "float32"}
    with LLM(str(target), draft, device="cpu", progress=False, generation_config="none", **options) as llm:
        for number, change in enumerate([{}, *case.changes]):
            if change and not llm.engine.parts.drafter.proposes:  # no draft, or a target that cannot be rolled back
                change = {**change, "num_speculative_tokens": 0}
            if change:
                llm.engine.reconfigure(**change)
            for (request, one), output in zip(
                runs, _generate(llm, [r for r, _ in runs], case.interleaved), strict=True
            ):
                where = f"configuration {number}, prompt of {len(request['prompt'])} tokens: "
                tokens, params = output.outputs[0].token_ids, _params(request)
                if tokens != one.tokens:
                    found = _classify(request["prompt"], tokens, one, reference)
                    if found.failed:
                        return found._replace(detail=where + found.detail)
                    doubt = found
                    continue
                compared += len(tokens)
                if problem := _text_problem(case, target, request["prompt"], output, params):
                    return Outcome("different", where + problem)
                if problem := _logprob_problem(output, one):
                    return Outcome("different", where + problem)
            if problem := _lost(llm):
                return Outcome("different", problem)
    return doubt._replace(tokens=compared)


def _generate(llm: LLM, requests: list[dict[str, Any]], interleaved: bool) -> list[Any]:
    if not interleaved:
        return [llm.generate(request["prompt"], _params(request))[0] for request in requests]
    streams = [llm.stream(request["prompt"], _params(request)) for request in requests]
    running: list[Iterator[str]] = [iter(stream) for stream in streams]
    while running:
        running = [one for one in running if next(one, None) is not None]
    return [stream.completion for stream in streams]


def _classify(prompt: list[int], tokens: list[int], expected: Expected, reference: Reference) -> Outcome:
    """Return a tie if two tokens are nearly equally likely, and `unstable` if transformers disagrees with itself."""
    pairs = zip(tokens, expected.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(expected.tokens)))
    text = f"token {at + 1} of {len(expected.tokens)}: "
    if at in (len(tokens), len(expected.tokens)):
        return Outcome("different", f"{text}{len(tokens)} tokens instead of {len(expected.tokens)}")
    ours, theirs = tokens[at], expected.tokens[at]
    margin = float(expected.scores[at][theirs] - expected.scores[at][ours])
    # one forward of transformers over all tokens differs from its `generate` by rounding, or by more
    moved = float((reference.whole_logits([*prompt, *expected.tokens[:at]]) - expected.logits[at]).abs().max())
    text += f"{ours} instead of {theirs}; margin {margin:.3g}, one forward of transformers moves logits by {moved:.3g}"
    return Outcome("tie" if margin < TIE else "unstable" if margin < 2 * moved else "different", text)


def _text_problem(case: Case, directory: Path, prompt: list[int], output: Any, params: SamplingParams) -> str | None:
    """Return how the text differs from the tokenizer's text of the whole."""
    found = output.outputs[0]
    if case.tokenizer == "none":
        return f"text without a tokenizer: {found.text!r}" if found.text else None
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    ended = found.finish_reason == "stop"
    tokens = found.token_ids[:-1] if ended else found.token_ids
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens))
    # A byte-fallback tokenizer replaces a whole run of bytes if one is wrong, also bytes that were released before.
    # Either kind may complete a character that the prompt has started.
    if before.endswith(REPLACEMENT) or (case.tokenizer == "byte-fallback" and REPLACEMENT in before + whole):
        return (
            None if found.text.count(REPLACEMENT) <= whole.count(REPLACEMENT) else f"text {found.text!r} of {whole!r}"
        )
    return None if before + found.text == whole else f"text {found.text!r} after {before!r}, instead of {whole!r}"


def _logprob_problem(output: Any, expected: Expected) -> str | None:
    """Return how log-probabilities differ."""
    for place, found in enumerate(output.outputs[0].logprobs or ()):
        rows = expected.logits[place].log_softmax(dim=-1)
        for token, one in found.items():
            if not math.isclose(one.logprob, float(rows[token]), abs_tol=LOGPROB_TOLERANCE):
                return f"log-probability of token {token} at {place}: {one.logprob} instead of {float(rows[token])}"
    return None


def _lost(llm: LLM) -> str | None:
    """Return what requests have left behind: pins, demands, KV caches, slots."""
    pool = llm.engine.experts.pool
    pool.residents()
    cache_ = pool._cache
    if any(entry.pins for entry in cache_.entries()) or any(cache_._layer_pins) or pool._demands:
        return "an expert stays pinned"
    if len(cache_) + len(cache_._free) != cache_.slot_count:
        return "a slot is lost"
    return "a KV cache is not released" if llm.engine.parts.target_kv else None


# ---- shrinking


def shrink(case: Case, kind: str) -> Case:
    """Make a failing case smaller, as long as it fails in the same way."""
    left = MAX_SHRINKS
    while True:
        for smaller in _smaller(case):
            if left == 0:
                return case
            left -= 1
            if run_case(smaller).kind == kind:
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less."""
    default = Case(case.family)
    for name in [one.name for one in fields(case)]:
        if name not in ("family", "weights", "requests") and getattr(case, name) != getattr(default, name):
            yield replace(case, **{name: getattr(default, name)})
    for index in range(len(case.requests)):
        if len(case.requests) > 1:
            yield replace(case, requests=case.requests[:index] + case.requests[index + 1 :])
    for index, request in enumerate(case.requests):
        for name in request:
            if name not in ("prompt", "max_tokens"):
                yield _with_request(case, index, {n: v for n, v in request.items() if n != name})
        if (tokens := request.get("max_tokens", 256)) > 1:
            yield _with_request(case, index, {**request, "max_tokens": tokens // 2, "min_tokens": 0})
            yield _with_request(case, index, {**request, "max_tokens": tokens - 1, "min_tokens": 0})
        if (size := len(request["prompt"])) > 1:
            yield _with_request(case, index, {**request, "prompt": request["prompt"][size // 2 :]})
            yield _with_request(case, index, {**request, "prompt": request["prompt"][1:]})
    for name in case.options:
        yield replace(case, options={n: v for n, v in case.options.items() if n != name})
    for name in case.settings:
        yield replace(case, settings={n: v for n, v in case.settings.items() if n != name})


def _with_request(case: Case, index: int, request: dict[str, Any]) -> Case:
    return replace(case, requests=[*case.requests[:index], request, *case.requests[index + 1 :]])


# ---- command


def fuzz(seed: int, seconds: float | None, cases: int | None, first: int = 0) -> Iterator[tuple[int, Case, Outcome]]:
    """Yield the cases of a seed from number `first` on, for so long or so many."""
    end = None if seconds is None else time.monotonic() + seconds
    for number in count(first) if cases is None else range(first, first + cases):
        if end is not None and time.monotonic() > end:
            return
        case = draw_case(seed, number)
        yield number, case, run_case(case)


def describe(case: Case, outcome: Outcome) -> str:
    """Return a failure with the command that repeats it."""
    command = f"python {Path('tests/fuzz') / Path(__file__).name} --case {shlex.quote(str(case))}"
    return f"{outcome.kind}: {outcome.detail}\nrepeat it with:\n{command}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="default: without end")
    parser.add_argument("--cases", type=int, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=Case.parse, help="run this one, as printed")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they were drawn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    build.compute_times = lambda *engine: None  # times passes when an engine is built; the output does not depend on it
    if arguments.case is not None:
        outcome = run_case(arguments.case)
        print(f"{outcome.kind}, {outcome.tokens} tokens compared\n{outcome.detail}")
        sys.exit(outcome.failed)
    kinds, tokens, failed = Counter[str](), 0, False
    started = time.monotonic()
    for number, case, outcome in fuzz(arguments.seed, arguments.seconds, arguments.cases, arguments.first):
        kinds[outcome.kind] += 1
        tokens += outcome.tokens
        failed = failed or outcome.failed
        if outcome.failed and not arguments.no_shrink:
            case = shrink(case, outcome.kind)
            outcome = run_case(case)
        if outcome.kind != "equal":
            print(f"seed {arguments.seed}, case {number}: {describe(case, outcome)}\n", flush=True)
        if (number + 1) % 50 == 0:
            print(f"{time.monotonic() - started:.0f} s, {dict(kinds)}, {tokens} tokens equal", flush=True)
    print(f"{time.monotonic() - started:.0f} s, {dict(kinds)}, {tokens} tokens equal")
    sys.exit(failed)


if __name__ == "__main__":
    main()
