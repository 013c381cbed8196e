"""Default sampling parameters, from a checkpoint's generation_config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from spmoe.config import SamplingParams
from spmoe.errors import CheckpointError, UsageError
from spmoe.files import decode_json

_FILE = "generation_config.json"
# settings of transformers that change the output of `generate` and have no counterpart here; values that are off
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ("", []),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": ({},),
}


def default_sampling_params(directory: Path) -> tuple[SamplingParams, list[str]]:
    """Return the sampling parameters that a checkpoint recommends, and names of its settings that are not supported.

    `do_sample: false` means greedy. `do_sample: true` without a temperature means 1. A temperature without `do_sample`
    is taken. Without any of these, decoding is greedy. `min_new_tokens` is at most `max_new_tokens`.
    """
    declared = _read(directory / _FILE)
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "repetition_penalty": "repetition_penalty"}
    samples = declared.get("do_sample")
    if samples is True:
        declared.setdefault("temperature", 1.0)
    if samples is not False and "temperature" in declared:
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
    try:
        given = {ours: declared[theirs] for theirs, ours in names.items() if theirs in declared}
        least = SamplingParams(max_tokens=10**9, min_tokens=given.pop("min_tokens", 0)).min_tokens
        params = SamplingParams(**given)
        params = replace(params, min_tokens=min(least, params.max_tokens))
    except UsageError as error:
        raise CheckpointError(
            f"{directory / _FILE} cannot be used ({error}); correct it, or pass --generation-config none"
        ) from error
    return params, [name for name, off in _UNSUPPORTED.items() if name in declared and declared[name] not in off]


def _read(path: Path) -> dict[str, Any]:
    """Return the settings that are given. `Checkpoint.find` reports a file that is damaged or cannot be read."""
    try:
        declared = decode_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in declared.items() if value is not None} if isinstance(declared, dict) else {}
