"""Default sampling parameters, from a checkpoint's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmoe.config import SamplingParams
from spmoe.errors import CheckpointError, UsageError

_FILE = "generation_config.json"
# settings of transformers that change the output of `generate` and have no counterpart here; values that are off
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ("", []),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": ({},),
}


def default_sampling_params(directory: Path) -> tuple[SamplingParams, list[str]]:
    """Return the sampling parameters that a checkpoint recommends, and names of its settings that are not supported.

    `do_sample: false` means greedy. `do_sample: true` without a temperature means 1. A temperature without `do_sample`
    is taken. Without any of these, decoding is greedy.
    """
    declared = _read(directory / _FILE)
    names = {"max_new_tokens": "max_tokens", "repetition_penalty": "repetition_penalty"}
    samples = declared.get("do_sample")
    if samples is True:
        declared.setdefault("temperature", 1.0)
    if samples is not False and "temperature" in declared:
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
    try:
        params = SamplingParams(**{ours: declared[theirs] for theirs, ours in names.items() if theirs in declared})
    except UsageError as error:
        raise CheckpointError(
            f"{directory / _FILE} cannot be used ({error}); correct it, or pass --generation-config none"
        ) from error
    return params, [name for name, off in _UNSUPPORTED.items() if name in declared and declared[name] not in off]


def _read(path: Path) -> dict[str, Any]:
    """Return the settings that are given. `Checkpoint.find` reports a file that is damaged or cannot be read."""
    try:
        declared = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in declared.items() if value is not None} if isinstance(declared, dict) else {}
