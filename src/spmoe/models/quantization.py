"""`quantization_config`: how a checkpoint declares the storage of its quantized weights.

The declaration is parsed into one `Scheme` per group of modules. Which tensors are quantized follows from the tensors
themselves (see `quantized_matrices`); a declaration that contradicts them, or that spmoe cannot read, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

READABLE = (
    "fp8, mxfp8, mxfp4, gptq (4 or 8 bits), awq (4 bits), auto-round (int, 4 or 8 bits), compressed-tensors (int4, "
    "int8, fp8, mxfp8, mxfp4, nvfp4) or modelopt (FP8, MXFP8, NVFP4)"
)
_GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # version 1 stores zero points minus one
_FORMATS = {  # of compressed-tensors
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"),
}
_AUTO_ROUND_LAYOUTS = {  # packing format -> layout of gptq, or awq
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq"), "gptq"),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), "gptq_v2"),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq", "auto_awq"), "awq"),
}
_NOT_QUANTIZED_BITS = 16
_MXFP8_BLOCK = (1, 32)


class UnreadableError(ValueError):
    """A declaration that spmoe cannot read; the message says what about it, without naming the checkpoint."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Declared storage of one group of matrices W[out, in]."""

    kind: str  # "fp8", "int", "mxfp4" or "nvfp4"
    bits: int
    group: int | None = None  # inputs that share a scale; None: not by groups of inputs
    block: tuple[int, int] | None = None  # (outputs, inputs) that share a scale, of fp8
    symmetric: bool = True  # whether there are no zero points
    targets: tuple[str, ...] = ()  # modules: names, `re:` patterns or globs; class names, or none, match every module

    def __str__(self) -> str:
        text = f"int{self.bits}" if self.kind == "int" else self.kind
        return text if self.group is None else f"{text} in groups of {self.group}"


@dataclass(frozen=True)
class Quantization:
    """Storage of a checkpoint's weights, as its configuration declares it."""

    method: str
    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...] = ()  # modules that are not quantized: names, `re:` patterns or globs
    zero_offset: int = 0  # added to stored zero points, of gptq

    def scheme(self, module: str) -> Scheme:
        """Return the scheme of a module; raise ValueError if it has none or is declared as not quantized."""
        ignored, ignored_patterns = self._ignored
        if module in ignored or any(_matches(module, pattern) for pattern in ignored_patterns):
            raise ValueError(f"{module} is quantized, but the configuration lists it among the modules that are not")
        if len(self.schemes) == 1:
            return self.schemes[0]
        names, patterns, rest = self._targets
        by_pattern = (scheme for pattern, scheme in patterns if _matches(module, pattern))
        parents = (names[parent] for parent in _parents(module) if parent in names)
        found = names.get(module) or next(by_pattern, None) or next(parents, None) or rest
        if found is None:
            raise ValueError(f"{module} is quantized, but no group of the configuration has it as a target")
        return found

    @cached_property
    def _targets(self) -> tuple[dict[str, Scheme], list[tuple[str, Scheme]], Scheme | None]:
        """Return schemes by name, by pattern in the order of the configuration, and that of all other modules."""
        names: dict[str, Scheme] = {}
        patterns: list[tuple[str, Scheme]] = []
        for scheme in self.schemes:
            for target in scheme.targets:
                if _is_pattern(target):
                    patterns.append((target, scheme))
                else:
                    names.setdefault(target, scheme)
        rest = (one for one in self.schemes if not one.targets or any(_is_class(target) for target in one.targets))
        return names, patterns, next(rest, None)

    @cached_property
    def _ignored(self) -> tuple[set[str], list[str]]:
        """Return names and patterns; large checkpoints list hundreds of names and have many thousands of modules."""
        patterns = [one for one in self.ignored if _is_pattern(one)]
        return set(self.ignored) - set(patterns), patterns


def _is_class(target: str) -> bool:
    """Return whether a target is a class such as Linear, not a module's name or pattern."""
    return target[:1].isupper() and target.isidentifier()


def _is_pattern(target: str) -> bool:
    return target.startswith("re:") or "*" in target


def _parents(module: str) -> Iterator[str]:
    """Yield the modules that hold a module, the nearest first."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatchcase(module, pattern) if "*" in pattern else module == pattern


def read_quantization(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None, own_file: Mapping[str, Any] | None = None
) -> Quantization | None:
    """Parse the quantization of config.json (None: 16 or 32 bits); raise UnreadableError if spmoe cannot read it.

    `modelopt` is the content of hf_quant_config.json, which ModelOpt writes beside or instead, and `own_file` that of
    quantize_config.json or quant_config.json, which older uploads in gptq and awq have instead.
    """
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    keys = ("quantization_config", "compression_config")
    declared = next((place[key] for place in places for key in keys if place.get(key) is not None), None)
    inner = modelopt.get("quantization") if modelopt is not None else None
    if not isinstance(inner, dict) or inner.get("quant_algo") is None:  # otherwise only the KV cache is quantized
        inner = None
    if declared is None and inner is not None:
        declared = {"quant_method": "modelopt", **inner}
    if declared is None and own_file is not None:
        declared = _complete(own_file)
    if declared is None:
        return None
    if not isinstance(declared, dict):
        raise UnreadableError("an unknown method, since quantization_config is not an object")
    method = declared.get("quant_method")
    if method is None and "quant_algo" in declared:
        method = "modelopt"
    if method is None and "config_groups" in declared:
        method = "compressed-tensors"
    if method in ("modelopt", "modelopt_mixed") and inner is not None:
        declared = {**inner, **declared}  # one of them may lack the algorithm of each layer
    parse = _METHODS.get(str(method))
    if parse is None:
        raise UnreadableError(str(method or "an unknown method"))
    try:
        return parse(declared)
    except re.error as error:
        raise UnreadableError(f"{method}, with the pattern {error.pattern!r}, which is no regular expression") from None


def _complete(own_file: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the content of a file of gptq or awq with its method, which it may lack; None if it is of neither."""
    if own_file.get("quant_method") is not None:
        return own_file
    if "w_bit" in own_file:
        return {**own_file, "quant_method": "awq"}
    return {**own_file, "quant_method": "gptq"} if "bits" in own_file and "desc_act" in own_file else None


def _fp8(declared: Mapping[str, Any]) -> Quantization:
    fmt = declared.get("fmt", declared.get("weight_format", "e4m3"))
    if fmt not in ("e4m3", "float8_e4m3fn", None):
        raise UnreadableError(f"fp8 as {fmt} (only e4m3 is supported)")
    block = declared.get("weight_block_size")
    if block is None and declared.get("quant_method") == "mxfp8":
        block = _MXFP8_BLOCK
    return Quantization("fp8", (_fp8_scheme("fp8", block),), _names(declared, "modules_to_not_convert"))


def _fp8_scheme(method: str, block: Any, targets: tuple[str, ...] = ()) -> Scheme:
    if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):  # the older way of writing it
        block = [int(number) for number in block.split("x")]
    if block is not None and (
        not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block)
    ):
        raise UnreadableError(f"{method} with the block size {block!r}, which is not two numbers")
    return Scheme("fp8", 8, block=None if block is None else (block[0], block[1]), targets=targets)


def _mxfp4(declared: Mapping[str, Any]) -> Quantization:
    # its list of modules that are not converted has patterns for whole layers; tensors say which are quantized
    return Quantization("mxfp4", (Scheme("mxfp4", 4, group=32),))


def _gptq(declared: Mapping[str, Any]) -> Quantization:
    scheme = _gptq_scheme("gptq", declared)
    default = "gptq_v2" if declared.get("quant_method") == "gptq_v2" else "gptq"
    version = str(declared.get("checkpoint_format") or default)
    if version not in _GPTQ_ZERO_OFFSETS:
        raise UnreadableError(f"gptq in the layout {version} (only gptq and gptq_v2 are supported)")
    dynamic = declared.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise UnreadableError("gptq with `dynamic` that is not an object")
    ignored = tuple(f"re:{pattern.removeprefix('-:')}" for pattern in dynamic if pattern.startswith("-:"))
    _require_patterns(ignored)
    changed = list[Scheme]()
    for pattern, settings in dynamic.items():
        if pattern.startswith("-:") or not settings:
            continue
        if not isinstance(settings, dict):
            raise UnreadableError(f"gptq with settings for the modules {pattern!r} (dynamic) that are not an object")
        target = f"re:{pattern.removeprefix('+:')}"
        _require_patterns([target])
        changed.append(_gptq_scheme(f"gptq for the modules {pattern!r}", {**declared, **settings}, (target,)))
    return Quantization("gptq", _without_repeats(changed, scheme), ignored, _GPTQ_ZERO_OFFSETS[version])


def _gptq_scheme(method: str, declared: Mapping[str, Any], targets: tuple[str, ...] = ()) -> Scheme:
    bits, group = _integer(method, declared, "bits"), _integer(method, declared, "group_size", 128)
    _require_bits(method, bits)
    # one group of all inputs has no order, and static groups were formed before the inputs were sorted
    if declared.get("desc_act") and group > 0 and not declared.get("static_groups"):
        raise UnreadableError(
            f"{method} with act-order (desc_act true: groups are not contiguous; an upload without it can be read)"
        )
    symmetric = bool(declared.get("sym", False))
    return Scheme("int", bits, group=None if group < 1 else group, symmetric=symmetric, targets=targets)


def _without_repeats(changed: Iterable[Scheme], default: Scheme) -> tuple[Scheme, ...]:
    """Return the schemes of some modules, and that of all others; a single one if none differs."""
    changed = tuple(changed)
    differ = any(replace(scheme, targets=()) != default for scheme in changed)
    return (*changed, default) if differ else (default,)


def _auto_round(declared: Mapping[str, Any]) -> Quantization:
    packing = str(declared.get("packing_format") or "auto_round:auto_gptq")
    kind = declared.get("data_type") or "int"
    if kind != "int" or packing not in _AUTO_ROUND_LAYOUTS:
        raise UnreadableError(
            f"auto-round with {kind} weights in the layout {packing} (only int in the layouts of gptq and awq is "
            "supported)"
        )
    layout, default = _AUTO_ROUND_LAYOUTS[packing], _auto_round_scheme(packing, declared)
    extra = declared.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(settings, dict) for settings in extra.values()):
        raise UnreadableError("auto-round with `extra_config` that is not an object of objects")
    ignored, changed = list[str](), dict[Scheme, list[str]]()
    for name, settings in extra.items():
        target = name if re.fullmatch(r"[\w.-]+", name) else f"re:.*(?:{name})"
        _require_patterns([target])
        if _integer("auto-round", settings, "bits", 0) >= _NOT_QUANTIZED_BITS:
            ignored.append(target)
        else:
            changed.setdefault(_auto_round_scheme(packing, {**declared, **settings}), []).append(target)
    schemes = _without_repeats((replace(scheme, targets=tuple(names)) for scheme, names in changed.items()), default)
    method = "awq" if layout == "awq" else "gptq"
    return Quantization(method, schemes, tuple(ignored), _GPTQ_ZERO_OFFSETS.get(layout, 0))


def _auto_round_scheme(packing: str, declared: Mapping[str, Any]) -> Scheme:
    scheme = _gptq_scheme("auto-round", {"sym": True, **declared, "desc_act": False})
    if scheme.bits != 4 and _AUTO_ROUND_LAYOUTS[packing] == "awq":
        raise UnreadableError(f"auto-round with {scheme.bits} bits in the layout {packing} (only 4 are supported)")
    return scheme


def _awq(declared: Mapping[str, Any]) -> Quantization:
    bits = _integer("awq", declared, "bits" if "bits" in declared else "w_bit")
    group = _integer("awq", declared, "group_size" if "group_size" in declared else "q_group_size", 128)
    if bits != 4:
        raise UnreadableError(f"awq with {bits} bits (only 4 are supported)")
    version = str(declared.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnreadableError(f"awq in the layout {version} (only gemm is supported)")
    scheme = Scheme("int", 4, group=None if group < 1 else group, symmetric=not declared.get("zero_point", True))
    return Quantization("awq", (scheme,), _names(declared, "modules_to_not_convert"))


def _modelopt(declared: Mapping[str, Any]) -> Quantization:
    ignored = (*_names(declared, "exclude_modules"), *_names(declared, "ignore"))
    if str(declared.get("quant_algo")).upper() != "MIXED_PRECISION":
        return Quantization("modelopt", (_modelopt_scheme(declared),), ignored)
    layers = declared.get("quantized_layers")
    if layers is None and declared.get("config_groups"):
        return Quantization("modelopt", _group_schemes("modelopt", _config_groups("modelopt", declared)), ignored)
    if not isinstance(layers, dict) or not layers or not all(isinstance(one, dict) for one in layers.values()):
        raise UnreadableError("modelopt with MIXED_PRECISION but without quantized_layers")
    found: dict[Scheme, list[str]] = {}  # with the modules, or those that hold them, such as all experts of a layer
    for name, settings in layers.items():
        found.setdefault(_modelopt_scheme(settings), []).append(name)
    _require_patterns(layers)
    return Quantization("modelopt", tuple(replace(one, targets=tuple(names)) for one, names in found.items()), ignored)


def _modelopt_scheme(settings: Mapping[str, Any]) -> Scheme:
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return _fp8_scheme("modelopt", None)
    if algorithm == "FP8_PB_WO":
        return _fp8_scheme("modelopt", [_integer("modelopt", settings, "group_size", 128)] * 2)
    if algorithm == "MXFP8":
        return _fp8_scheme("modelopt", _MXFP8_BLOCK)
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise UnreadableError(
            f"modelopt with {settings.get('quant_algo')} (only FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, NVFP4 "
            "and W4A16_NVFP4 are supported)"
        )
    group = _integer("modelopt", settings, "group_size", 16)
    if group != 16:
        raise UnreadableError(f"modelopt NVFP4 with groups of {group} (only 16 are supported)")
    return Scheme("nvfp4", 4, group=16)


def _compressed_tensors(declared: Mapping[str, Any]) -> Quantization:
    method = "compressed-tensors"
    groups, layout = _config_groups(method, declared), declared.get("format")
    formats = {str(one) for one in (layout, *(group.get("format") for group in groups.values())) if one is not None}
    if unknown := sorted(formats - _FORMATS):
        raise UnreadableError(f"{method} in the format {unknown[0]} (supported: {', '.join(sorted(_FORMATS))})")
    sparsity = declared.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise UnreadableError(f"{method} with sparse weights ({sparsity['format']})")
    return Quantization(method, _group_schemes(method, groups), _names(declared, "ignore"))


def _config_groups(method: str, declared: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    groups = declared.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise UnreadableError(f"{method} without config_groups")
    return groups


def _group_schemes(method: str, groups: Mapping[str, Mapping[str, Any]]) -> tuple[Scheme, ...]:
    weights = [(group["weights"], _names(group, "targets")) for group in groups.values() if group.get("weights")]
    if not weights or not all(isinstance(one, dict) for one, _ in weights):
        raise UnreadableError(f"{method} without settings for weights")
    return tuple(_group_scheme(method, *one) for one in weights)


def _group_scheme(method: str, weights: Mapping[str, Any], targets: tuple[str, ...]) -> Scheme:
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    bits, symmetric = _integer(method, weights, "num_bits", 8), bool(weights.get("symmetric", True))
    group = _integer(method, weights, "group_size", 0)
    if weights.get("actorder") not in (None, False, "static", "weight"):
        raise UnreadableError(
            f"{method} with act-order (actorder {weights['actorder']}: groups are not contiguous; an upload without it "
            "can be read)"
        )
    by_group = group if strategy in (None, "group", "tensor_group") and group > 0 else None
    if strategy in ("group", "tensor_group") and by_group is None:
        raise UnreadableError(f"{method} with the strategy {strategy} but group_size {weights.get('group_size')!r}")
    if kind == "int":
        _require_bits(method, bits)
        return Scheme("int", bits, by_group, symmetric=symmetric, targets=targets)
    if kind != "float" or not symmetric or bits not in (4, 8):
        raise UnreadableError(f"{method} with {bits}-bit {kind} weights{'' if symmetric else ' and zero points'}")
    if bits == 8:
        return _fp8_scheme(method, [1, by_group] if by_group else weights.get("block_structure"), targets)
    if by_group not in (16, 32):
        raise UnreadableError(f"{method} with 4-bit float weights in groups of {group} (only 16 and 32 are supported)")
    return Scheme("nvfp4" if by_group == 16 else "mxfp4", 4, by_group, targets=targets)


def _require_bits(method: str, bits: int) -> None:
    if bits not in (4, 8):
        raise UnreadableError(f"{method} with {bits} bits (only 4 and 8 are supported)")


def _integer(method: str, declared: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = declared.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int:
        raise UnreadableError(f"{method} with {key} {value!r}, which is not a whole number")
    return value


def _names(declared: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = declared.get(key)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise UnreadableError(f"{declared.get('quant_method', 'quantization')} with {key} that is not a list of names")
    _require_patterns(value)
    return tuple(value)


def _require_patterns(names: Iterable[str]) -> None:
    """Raise re.error for a pattern that is no regular expression."""
    for one in names:
        re.compile(one.removeprefix("re:") if one.startswith("re:") else "")


_METHODS = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    **dict.fromkeys(("auto-round", "autoround", "intel/auto-round"), _auto_round),
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "compressed-tensors": _compressed_tensors,
}
