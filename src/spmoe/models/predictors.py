"""Fitted predictors on disk: the projection of a draft's hidden states, one file per pair of target and draft."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spmoe.config import home
from spmoe.errors import CheckpointError, UsageError, panics_as_errors, reason
from spmoe.files import atomic_write
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.load import origin_of
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.predict.projection import HiddenStateProjection
from spmoe.system.cache import PREDICTOR_FORMAT
from spmoe.system.origin import origins_to_json


def predictor_path(target: Checkpoint, draft: Checkpoint) -> Path:
    """Return the path of a pair's predictor; its name is a hash of both checkpoints' fingerprints."""
    pair = json.dumps([target.fingerprint, draft.fingerprint])
    return home() / "predictors" / f"{hashlib.sha256(pair.encode()).hexdigest()[:20]}.safetensors"


def find_predictor(target: Checkpoint, draft: Checkpoint) -> Path | None:
    """Return the path of a pair's predictor if the file exists."""
    path = predictor_path(target, draft)
    try:
        return path if path.exists() else None
    except OSError:  # a directory without permission; other code that needs it reports the error
        return None


def write_predictor(
    target: Checkpoint, draft: Checkpoint, projection: HiddenStateProjection, facts: dict[str, Any]
) -> Path:
    """Write a pair's projection to its file; `facts` are stored in the metadata for people to read."""
    path = predictor_path(target, draft)
    meta = {
        "format": PREDICTOR_FORMAT,
        "target": target.fingerprint,
        "draft": draft.fingerprint,
        "origin": json.dumps(origins_to_json(map(origin_of, (target, draft)))),
        "facts": json.dumps(facts),
    }
    tensors = {"weights": projection.weights.cpu().contiguous(), "biases": projection.biases.cpu().contiguous()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as place:
            save_file(tensors, place, meta)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write {path} ({reason(error)}); point SPMOE_HOME at a writable directory") from error
    return path


def read_predictor(
    target: Checkpoint, draft: Checkpoint, model: Target, runner: ModelRunner
) -> HiddenStateProjection | None:
    """Read a pair's projection; None if there is no file. Raises CheckpointError for a file that cannot be used."""
    if (path := find_predictor(target, draft)) is None:
        return None
    wanted = [len(model.moe), runner.hidden_size, model.hidden_size]
    try:
        with panics_as_errors(), safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            expected = {"format": PREDICTOR_FORMAT, "target": target.fingerprint, "draft": draft.fingerprint}
            for name, value in expected.items():
                if meta.get(name) != value:
                    raise ValueError(f"it was written for another {name}")
            weights, biases = file.get_tensor("weights"), file.get_tensor("biases")
        if [*weights.shape] != wanted or [*biases.shape] != [wanted[0], 1, wanted[2]]:
            raise ValueError(f"its weights have shape {[*weights.shape]} instead of {wanted}")
        if not (bool(weights.isfinite().all()) and bool(biases.isfinite().all())):
            raise ValueError("its values are not finite")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"the fitted predictor {path} is not used ({reason(error)}); delete it, or fit it again with `spmoe "
            "fit-predictor`"
        ) from error
    return HiddenStateProjection(weights, biases).to(model.model.device, model.model.dtype)
