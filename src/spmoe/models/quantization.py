"""How a checkpoint says that its weights are stored in fewer bits than they are run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

USUAL_BLOCK = (128, 128)


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's weights are stored, as far as its config.json tells."""

    method: str
    block: tuple[int, int] = USUAL_BLOCK  # outputs and inputs that share a scale, where there are blocks


def read_quantization(declared: Any) -> Quantization | None:
    """What `quantization_config` means; None where weights cannot be expanded from it."""
    if not isinstance(declared, dict):
        return None
    method = str(declared.get("quant_method"))
    if method == "mxfp4":
        return Quantization(method)
    if method == "fp8":
        return _with_block(method, declared.get("weight_block_size"))
    groups = declared.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, dict) or not groups:
        return None
    weights = [group["weights"] for group in groups.values() if isinstance(group, dict) and "weights" in group]
    if len(weights) < len(groups) or not all(isinstance(one, dict) for one in weights):
        return None
    kinds = {(one.get("type"), one.get("num_bits"), one.get("symmetric", True)) for one in weights}
    blocks = {str(one.get("block_structure")) for one in weights}
    if kinds != {("float", 8, True)} or len(blocks) > 1:
        return None
    return _with_block(method, weights[0].get("block_structure"))


def _with_block(method: str, block: Any) -> Quantization | None:
    if block is None:
        return Quantization(method)
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        return None
    return Quantization(method, (block[0], block[1]))
