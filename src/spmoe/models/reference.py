"""The reference: a checkpoint run by transformers alone, with its own experts, to compare tokens with.

A model that fits in memory is loaded whole. Otherwise its own `forward` runs with one decoder layer in memory at a
time: a hook before each layer reads the layer's weights with transformers' loader and conversion rules, and a hook
after it frees them. Embeddings, norms and the output head stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers import __version__ as transformers_version
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from spmoe.backends.devices import free_memory
from spmoe.config import format_bytes
from spmoe.errors import CheckpointError, SpmoeError, UsageError, reason
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint, quiet
from spmoe.models.experts_seam import experts_modules
from spmoe.models.load import expert_parameter_names, load_dense_skeleton, require_experts
from spmoe.models.longrope import LongRope
from spmoe.models.tensors import CheckpointTensors
from spmoe.system.host import available_memory

EXPERTS = "eager"  # transformers' loop over experts: plain PyTorch, for every device and dtype
GENERATE, FORWARD, LAYERS = "generate", "forward", "layers"
_MAX_BATCH_TOKENS = 8192  # of one pass layer by layer, padding included; bounds the activations
_MARGIN_BYTES = 512 * 2**20  # for activations, logits and the KV cache beside the weights

Report = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """How the reference runs, and why."""

    method: str  # GENERATE, FORWARD or LAYERS
    device: torch.device
    whole: bool  # whether all weights are in memory at once
    weight_bytes: int  # of the whole model
    layer_bytes: int  # of its largest decoder layer
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """Reference logits at one generated position."""

    token: int  # the most likely one
    logit: float  # of that token
    own_logit: float  # of the token that this engine generated


class Generated:
    """Tokens of transformers' greedy `generate`, and the logits that each was chosen from."""

    def __init__(self, tokens: list[int], logits: Tensor) -> None:
        self.tokens = tokens
        self._logits = logits  # [tokens, vocabulary]

    def score(self, position: int, own: int) -> Scored:
        """Return the logits of transformers' token and of `own` at a position of the output."""
        row, token = self._logits[position], self.tokens[position]
        return Scored(token, float(row[token]), float(row[own]))


def plan_reference(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, wanted: str) -> ReferencePlan:
    """Choose how the reference runs, by the bytes of its weights and the memory that is free now.

    `device` is the engine's. `wanted`: a method, or `auto` for GENERATE if the model fits and LAYERS if it does not.
    """
    skeleton = load_dense_skeleton(checkpoint)
    require_experts(checkpoint, skeleton)
    total, layers = _nbytes(skeleton, dtype), [_nbytes(layer, dtype) for layer in _decoder_layers(skeleton).values()]
    largest, host = max(layers), available_memory()
    free = host if device.type == "cpu" else free_memory(device)
    # a layer's tensors are held twice while its experts are stacked
    whole = total + largest + _MARGIN_BYTES
    one_layer = total - sum(layers) + 2 * largest + _MARGIN_BYTES
    notes: list[str] = []
    if wanted != LAYERS:
        if whole <= min(free, host):  # from_pretrained loads into host memory
            return ReferencePlan(FORWARD if wanted == FORWARD else GENERATE, device, True, total, largest)
        if wanted == GENERATE:
            raise UsageError(
                f"--reference generate needs {format_bytes(whole)} for {checkpoint.name} in transformers, but "
                f"{format_bytes(min(free, host))} are free; use --reference layers, or free memory"
            )
        notes.append(
            f"transformers needs {format_bytes(whole)} for the whole model and {format_bytes(min(free, host))} are "
            "free: it runs layer by layer"
        )
    if one_layer > free and device.type != "cpu":
        notes.append(
            f"one layer needs {format_bytes(one_layer)} and {format_bytes(free)} are free on {device.type}: "
            "transformers runs on the CPU, whose kernels round differently"
        )
        device, free = torch.device("cpu"), host
    if one_layer > free:
        raise UsageError(
            f"transformers needs {format_bytes(one_layer)} to run {checkpoint.name} one layer at a time, but "
            f"{format_bytes(free)} are free; free memory, or use a machine with more"
        )
    return ReferencePlan(LAYERS, device, False, total, largest, tuple(notes))


class Reference:
    """A model that transformers runs. A context manager; `close` frees its weights and files.

    With a `format`, its experts have the weights of the conversion to that format.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        plan: ReferencePlan,
        report: Report = lambda done, total: None,
        format: ExpertFormat | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._tensors = CheckpointTensors(checkpoint)
        skeleton = load_dense_skeleton(checkpoint)
        cls = type(skeleton) if plan.whole else _without_layers(type(skeleton))
        with reference_errors(checkpoint):
            weights = self._tensors.lazy()
            self.model: Any = _load(checkpoint, weights, cls, skeleton.config, dtype)
            self.model.to(plan.device)
            if not plan.whole:
                _LayerWeights(self.model, weights, dtype, plan.device, report, format)
            elif format is not None:
                _convert_experts(self.model, format)
        self._longrope = LongRope.of(self.model)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights and close the checkpoint's files. Idempotent."""
        self.model = None
        self._tensors.__exit__(None, None, None)

    def generate(self, prompt: Sequence[int], count: int) -> Generated:
        """Generate `count` tokens greedily with transformers' `generate`; end-of-text tokens do not end it."""
        with reference_errors(self._checkpoint), torch.inference_mode():
            ids = torch.tensor([list(prompt)], device=self._plan.device)
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logits = torch.cat([row.cpu() for row in output.logits])
            return Generated(output.sequences[0, len(prompt) :].tolist(), logits)

    def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, list[Scored]]]:
        """Yield, for every (prompt, output), its index and the logits at every position of the output.

        One forward reads a whole sequence. Sequences of a model that runs layer by layer share passes, padded at the
        end: attention is causal, so padding changes nothing before it. LongRoPE chooses one set of factors for a
        forward, so positions after its switch are left out of a sequence that crosses it.
        """
        cut = [(prompt, output[: self._comparable(len(prompt), len(output))]) for prompt, output in sequences]
        for indices in self._batches([len(prompt) + len(output) for prompt, output in cut]):
            with reference_errors(self._checkpoint), torch.inference_mode():
                yield from zip(indices, self._score_batch([cut[index] for index in indices]), strict=True)

    def logits(self, windows: Sequence[list[int]]) -> Iterator[Tensor]:
        """Yield the logits of every position of each window; all windows have the same length."""
        # -> [tokens, vocabulary] float32, in host memory
        for indices in self._batches([len(window) for window in windows]):
            with reference_errors(self._checkpoint), torch.inference_mode():
                ids = torch.tensor([windows[index] for index in indices], device=self._plan.device)
                yield from self.model(input_ids=ids, use_cache=False).logits.float().cpu()

    def _comparable(self, start: int, count: int) -> int:
        distance = self._longrope.distance(start)
        return count if distance is None else min(count, distance)

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Group sequences by length; a whole model reads one at a time."""
        batch: list[int] = []
        alone = self._plan.whole or bool(self._longrope.switches)
        for index in sorted(range(len(lengths)), key=lambda one: lengths[one]):
            if batch and (alone or lengths[index] * (len(batch) + 1) > _MAX_BATCH_TOKENS):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _score_batch(self, batch: Sequence[tuple[list[int], list[int]]]) -> list[list[Scored]]:
        longest = max(len(prompt) + len(output) for prompt, output in batch) - 1  # the last token predicts nothing
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        rows = []  # positions whose logits predict each sequence's output
        for row, (prompt, output) in enumerate(batch):
            known = [*prompt, *output][:longest]
            ids[row, : len(known)] = torch.tensor(known)
            rows.append(range(len(prompt) - 1, len(prompt) + len(output) - 1))
        kept = sorted({position for positions in rows for position in positions})
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            options["logits_to_keep"] = torch.tensor(kept, device=self._plan.device)
        else:
            kept = list(range(longest))
        logits = self.model(input_ids=ids.to(self._plan.device), use_cache=False, **options).logits
        place = {position: index for index, position in enumerate(kept)}
        return [
            _scored(logits[row, [place[position] for position in positions]], output)
            for row, (positions, (_, output)) in enumerate(zip(rows, batch, strict=True))
        ]


def _scored(logits: Tensor, output: list[int]) -> list[Scored]:
    """Compare logits [tokens, vocabulary] with the tokens of the output."""
    best, tokens = logits.max(dim=-1)
    own = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])[:, 0]
    return [
        Scored(*values) for values in zip(tokens.tolist(), best.double().tolist(), own.double().tolist(), strict=True)
    ]


@contextmanager
def reference_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn any exception from transformers into one line."""
    try:
        with quiet():
            yield
    except (SpmoeError, MemoryError):
        raise
    except Exception as error:  # anything that a model's own code raises
        raise SpmoeError(
            f"transformers {transformers_version} cannot run {checkpoint.name} ({reason(error)}), so there is nothing "
            "to compare with; try another --reference, or another version of transformers"
        ) from error


# ---- loading


def _load(checkpoint: Checkpoint, weights: Mapping[str, Any], cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """Load a model with `from_pretrained`; weights that are stored in few bits are dequantized as they are read."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.directory, "local_files_only": True}
    if checkpoint.quantization is not None:
        source = {"pretrained_model_name_or_path": None, "state_dict": dict(weights)}
    model, info = cls.from_pretrained(
        **source, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True
    )
    _require_complete(checkpoint, info["missing_keys"])
    model.set_experts_implementation(EXPERTS)
    # the checkpoint's own settings, such as penalties, are not part of greedy decoding
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None)
    return model.eval().requires_grad_(False)


def _require_complete(checkpoint: Checkpoint, missing: set[str] | list[str]) -> None:
    if missing:
        raise CheckpointError(
            f"transformers finds no weights for {min(missing)} in {checkpoint.name} ({len(missing)} such), so it "
            "cannot be the reference; download the checkpoint again"
        )


def _convert_experts(model: nn.Module, format: ExpertFormat) -> None:
    """Replace the weights of all experts by those of their conversion."""
    with torch.no_grad():
        for _, module in experts_modules(model):
            parameters = {name: module.get_parameter(name) for name in expert_parameter_names(module)}
            for expert in range(len(next(iter(parameters.values())))):
                found = format.round_trip({name: parameter[expert] for name, parameter in parameters.items()})
                for name, tensor in found.items():
                    parameters[name][expert] = tensor


# ---- one layer at a time


def _decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers by path: all entries of the lists whose entries contain experts."""
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found: dict[str, nn.Module] = {}
    for path, _ in experts_modules(model):
        parts = path.split(".")
        outer = next((".".join(parts[:n]) for n in range(1, len(parts)) if ".".join(parts[:n]) in lists), None)
        if outer is None:
            raise CheckpointError(f"the experts at {path} are not in a list of layers, so layers cannot be run alone")
        found |= {f"{outer}.{name}": layer for name, layer in model.get_submodule(outer).named_children()}
    return found


def _nbytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of a module's parameters in this dtype; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize


def _without_layers(cls: Any) -> Any:
    """Return a subclass whose decoder layers have no parameters, so that transformers' loader reads none for them.

    `spmoe_parameters` keeps each layer's parameters on the meta device, as (module, name, parameter).
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        self.spmoe_parameters = {
            path: [(module, *named) for module in layer.modules() for named in module.named_parameters(recurse=False)]
            for path, layer in _decoder_layers(self).items()
        }
        for layer in _decoder_layers(self).values():
            for module in layer.modules():
                if any(True for _ in module.parameters()):
                    if module._non_persistent_buffers_set:  # transformers computes them once the parameters are there
                        raise ValueError(f"{type(module).__name__} in its layers needs all weights in memory")
                    module._is_hf_initialized = True  # type: ignore[assignment]  # there is nothing to initialize
        for module, name, _ in (one for layer in self.spmoe_parameters.values() for one in layer):
            module._parameters[name] = None

    # transformers finds conversion rules by class name, and only for classes of its own modules
    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _free(layer: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Replace a layer's parameters by those on the meta device."""
    for module, name, parameter in layer:
        module._parameters[name] = parameter


class _LayerWeights:
    """Loads a decoder layer's weights before its forward, and frees them after it."""

    def __init__(
        self,
        model: Any,
        weights: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        report: Report,
        format: ExpertFormat | None,
    ) -> None:
        self._model = model
        self._format = format
        self._report = report
        self._done = 0
        self._layers = _decoder_layers(model)
        for parameters in model.spmoe_parameters.values():
            _free(parameters)
        rules = get_model_conversion_mapping(model)
        self._config = LoadStateDictConfig(
            dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), device_map={"": device}, weight_mapping=rules
        )
        self._weights = self._by_layer(weights, rules)
        for path, layer in self._layers.items():
            layer.register_forward_pre_hook(lambda module, args, path=path: self._load(path))
            layer.register_forward_hook(
                lambda module, args, output, path=path: _free(model.spmoe_parameters[path]), always_call=True
            )

    def _by_layer(self, weights: Mapping[str, Any], rules: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Group the checkpoint's tensors by the decoder layer that they belong to after conversion."""
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix, known = self._model.base_model_prefix, self._model.state_dict()
        found: dict[str, dict[str, Any]] = {path: {} for path in self._layers}
        for name, tensor in weights.items():
            target, _ = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:  # as transformers' loader does
                target = name
            if (path := next((path for path in found if target.startswith(f"{path}.")), None)) is not None:
                found[path][name] = tensor
        return found

    def _load(self, path: str) -> None:
        info, _ = convert_and_load_state_dict_in_model(self._model, self._weights[path], self._config)
        own = {f"{path}.{name}" for name, _ in self._layers[path].named_parameters()}
        if missing := own & (info.missing_keys | {name for name, _, _ in info.mismatched_keys}):
            raise ValueError(f"no weights of the right shape for {min(missing)}")
        if info.conversion_errors:
            raise ValueError(next(iter(info.conversion_errors.values())))
        if self._format is not None:
            _convert_experts(self._layers[path], self._format)
        self._done = self._done % len(self._layers) + 1
        self._report(self._done, len(self._layers))
