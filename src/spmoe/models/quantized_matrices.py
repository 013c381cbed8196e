"""Quantized matrices of a checkpoint: found and checked by the headers of its files, decoded to parts of a format.

A quantized matrix W[out, in] is stored as several tensors: codes, scales, perhaps zero points. It stands for one dense
tensor, whose name the loader knows. A class per encoding says how its tensors are named and shaped, which weight format
holds the same values, and how the stored tensors become the parts of that format. All experts of a layer may lie in one
tensor with a first dimension of experts; their matrices are decoded one by one.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from spmoe.formats.base import Parts, WeightFormat, group_count
from spmoe.formats.fp4 import Mxfp4, Nvfp4
from spmoe.formats.fp8 import Fp8
from spmoe.formats.int4 import Int4
from spmoe.formats.int8 import Int8
from spmoe.models.quantization import Quantization, Scheme
from spmoe.models.repacking import (
    AWQ_ORDER,
    WORD_BITS,
    is_contiguous_grouping,
    regroup,
    signed,
    unpack_words,
    words_as_bytes,
    zeros_are_middle,
)
from spmoe.system.headers import StoredTensor

_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_EIGHT_BIT_FLOATS = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_EXPONENTS = {"U8", "F8_E8M0"}  # dtypes of scales that are powers of two, 2^(byte - 127)
_MOST_INPUTS = 128  # of a group, in kernels; scales of larger groups are repeated
_DEFAULT_BLOCK = (128, 128)  # of fp8 scales, if the configuration names none
# tensors that describe activations and KV caches, or that are read with a matrix; weights are dequantized without them
_NOT_WEIGHTS = {
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale", "qscale_act", "weight_shape"),
    *("output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point"),
}
_AUXILIARY = re.compile(
    rf"(\.|proj_)({'|'.join(sorted(_NOT_WEIGHTS))})$|\._extra_state$"
)  # `proj_`: beside a fused parameter
_PARTS_OF_WEIGHTS = (  # ends of names of tensors that only mean something beside the codes of a matrix
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_g_idx"),
    *("weight_packed", "qweight", "qzeros", ".g_idx", ".scales", "qscale_weight"),
    *("proj_scale_inv", "proj_packed", "proj_blocks", "proj_scales"),
)


class QuantizedMatrix(ABC):
    """One matrix, or one per expert, with the tensors that it is read from."""

    required: ClassVar[tuple[str, ...]]  # roles of its tensors besides the codes; a `/` separates alternatives
    optional: ClassVar[tuple[str, ...]] = ()
    transposed = False  # whether the dense tensor that it stands for is [in, out]
    outs: int
    ins: int
    format: WeightFormat | None  # of its parts; None: no format has these values, and it can only be made dense

    def __init__(
        self, name: str, module: str, sources: Mapping[str, str], tensors: Mapping[str, StoredTensor], scheme: Scheme
    ) -> None:
        self.name = name  # of the dense tensor
        self.module = module  # as the configuration calls it
        self.sources = sources  # tensors by role
        self.scheme = scheme
        self._tensors = {role: tensors[source] for role, source in sources.items()}
        codes = self._tensors["codes"].shape
        dims = len(codes) - self.code_dims
        if dims not in (0, 1) or 0 in codes:
            raise ValueError(f"{sources['codes']} has shape {list(codes)}, which is no matrix of {scheme}")
        self.experts = self._tensors["codes"].shape[0] if dims else None
        self.inspect()

    code_dims: ClassVar[int] = 2  # dimensions of the codes of one matrix

    @abstractmethod
    def inspect(self) -> None:
        """Set `outs`, `ins` and `format` from headers; raise ValueError if the tensors do not fit together."""

    @abstractmethod
    def parts(self, raw: Mapping[str, Tensor]) -> Parts:
        """Return the parts of one matrix in `format`."""  # raw: stored tensors by role, of one expert

    def stored_parts(self) -> dict[str, str] | None:
        """Return, for each part of `format`, the role of the tensor that holds its bytes; None if one is computed."""
        return None

    def dense(self, raw: Mapping[str, Tensor]) -> Tensor:
        """Return one matrix in float32."""  # -> [out, in]
        if self.format is None:
            raise NotImplementedError
        return self.format.dequantize(self.parts(raw), torch.float32)

    # ---- helpers of the encodings

    def shape(self, role: str) -> tuple[int, ...]:
        """Return the shape of a tensor of one matrix."""
        shape = self._tensors[role].shape
        if self.experts is None:
            return shape
        if not shape or shape[0] != self.experts:
            raise ValueError(f"{self.sources[role]} has shape {list(shape)}, but holds {self.experts} experts")
        return shape[1:]

    def require_shape(self, role: str, *accepted: tuple[int, ...]) -> None:
        """Raise ValueError unless a tensor has one of these shapes."""
        found = self.shape(role)
        if found not in accepted:
            expected = " or ".join(str(list(one)) for one in accepted)
            raise ValueError(
                f"{self.sources[role]} has shape {list(found)}, but {expected} belongs to {self.scheme} and "
                f"{self.sources['codes']} {list(self.shape('codes'))}"
            )

    def require_dtype(self, role: str, *accepted: str) -> None:
        """Raise ValueError unless a tensor has one of these dtypes."""
        if (found := self._tensors[role].dtype) not in accepted:
            raise ValueError(f"{self.sources[role]} is stored as {found}, but expected {' or '.join(accepted)}")

    def scale_dtype(self, role: str = "scale") -> torch.dtype:
        """Return the dtype of floating-point scales."""
        self.require_dtype(role, *_SCALE_DTYPES)
        return _SCALE_DTYPES[self._tensors[role].dtype]


def kernel_group(group: int) -> int:
    """Return the group size to store: large groups become several with the same scale."""
    return _MOST_INPUTS if group > _MOST_INPUTS and group % _MOST_INPUTS == 0 else group


class _Integers(QuantizedMatrix):
    """4- or 8-bit codes with a scale and perhaps a zero point per group of inputs."""

    group: int  # inputs that share a scale
    symmetric: bool  # whether zero points are the middle of the codes

    def choose_format(self) -> None:
        """Set the format from bits, group and symmetry."""
        dtype, group = self.scale_dtype(), self.scheme.group
        if self.scheme.bits == 4:
            self.format = Int4(_MOST_INPUTS if group is None else kernel_group(group), not self.symmetric, dtype)
        else:
            self.format = Int8(group or 0, dtype) if self.symmetric else None

    @abstractmethod
    def decode(self, raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales and zero points; None for symmetric weights."""
        # -> codes [out, in / 2] (4 bits) or [out, in] uint8, scale and zero [out, groups], zero uint8

    def parts(self, raw: Mapping[str, Tensor]) -> Parts:
        codes, scale, zero = self.decode(raw)
        if isinstance(self.format, Int8):
            return {"weight": signed(codes), "scale": scale}
        if not isinstance(self.format, Int4):
            raise NotImplementedError
        grouped = {"scale": scale} if zero is None else {"scale": scale, "zero": zero}
        finer = self.format.group
        return {"codes": codes, **{name: regroup(one, self.group, finer, self.ins) for name, one in grouped.items()}}

    def dense(self, raw: Mapping[str, Tensor]) -> Tensor:
        if self.format is not None:
            return super().dense(raw)
        codes, scale, zero = self.decode(raw)  # 8 bits with zero points
        if zero is None:
            raise NotImplementedError
        zero, scale = (one.float().repeat_interleave(self.group, dim=1)[:, : self.ins] for one in (zero, scale))
        return (codes.float() - zero) * scale

    def require_words(self) -> None:
        """Raise ValueError unless codes and zero points are stored as 32-bit words, and the index as integers."""
        self.require_dtype("codes", "I32", "U32")
        if "zeros" in self.sources:
            self.require_dtype("zeros", "I32", "U32")
        if "index" in self.sources:
            self.require_dtype("index", "I32", "I64")

    def require_groups(self, scale: tuple[int, ...], inputs_last: bool) -> None:
        """Set `group`; raise ValueError if there are not as many scales as the declared group size needs."""
        if len(scale) != 2:
            raise ValueError(f"{self.sources['scale']} has shape {list(scale)}, but one scale per group was expected")
        groups = scale[1] if inputs_last else scale[0]
        self.group = self.scheme.group or self.ins
        if groups != group_count(self.ins, self.group):
            fitting = next((g for g in (16, 32, 64, 128, 256, 512) if group_count(self.ins, g) == groups), None)
            hint = f", as groups of {fitting} have" if fitting else ""
            raise ValueError(
                f"{self.sources['scale']} has {groups} scales for {self.ins} inputs{hint}, but the configuration says "
                f"{self.scheme}"
            )

    def require_contiguous_groups(self, raw: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the inputs of a group do not follow each other."""
        if "index" in raw and not is_contiguous_grouping(raw["index"], self.group):
            raise ValueError(f"{self.sources['index']} is in act-order, which spmoe does not read")

    def require_symmetric(self, zeros: Tensor) -> None:
        """Raise ValueError if zero points contradict the declared symmetry."""
        if not zeros_are_middle(zeros, self.scheme.bits):
            raise ValueError(
                f"{self.sources['zeros']} has other zero points than the symmetric ones it is declared with"
            )


class GptqMatrix(_Integers):
    """Codes int32 [in / 8, out] packed along the inputs, zero points [groups, out / 8], scales [groups, out]."""

    required = ("scale:scales",)
    optional = ("zeros:qzeros", "index:g_idx")
    subtracted: ClassVar[int] = 0  # from every zero point, before they were packed into words

    def inspect(self) -> None:
        self.require_words()
        words, self.outs = self.shape("codes")
        pack = WORD_BITS // self.scheme.bits
        self.ins = words * pack
        self.symmetric = self.scheme.symmetric
        self.require_groups(self.shape("scale"), inputs_last=False)
        groups = group_count(self.ins, self.group)
        self.require_shape("scale", (groups, self.outs))
        if "zeros" in self.sources:
            self.require_shape("zeros", (groups, -(-self.outs // pack)))
        elif not self.symmetric:
            raise ValueError(f"{self.sources['codes']} has no zero points (qzeros), but is declared as asymmetric")
        if "index" in self.sources:
            self.require_shape("index", (self.ins,))
        self.choose_format()

    def decode(self, raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        bits = self.scheme.bits
        self.require_contiguous_groups(raw)
        zero = None
        if "zeros" in raw:
            words = raw["zeros"].view(torch.int32)
            zero = self._unpack_zeros(words + self.subtracted * _ones(bits))  # with carries, as it was subtracted
            if self.symmetric:
                as_they_are = self._unpack_zeros(words)  # some symmetric uploads of version 1 have those of version 2
                self.require_symmetric(as_they_are if zeros_are_middle(as_they_are, bits) else zero)
                zero = None
        # inputs lie in words along dimension 0, so the bytes of the transposed words are the packed codes
        return words_as_bytes(raw["codes"].view(torch.int32).T), raw["scale"].T.contiguous(), zero

    def _unpack_zeros(self, words: Tensor) -> Tensor:
        """Return the zero points of all outputs."""  # -> [out, groups] uint8
        return unpack_words(words, self.scheme.bits, 1)[:, : self.outs].T.contiguous()


class Gptq1Matrix(GptqMatrix):
    """GPTQ as most uploads have it: one was subtracted from every zero point."""

    subtracted = 1


class AwqMatrix(_Integers):
    """Codes int32 [in, out / 8] packed along the outputs in an own order, zero points alike, scales [groups, out]."""

    required = ("scale:scales",)
    optional = ("zeros:qzeros",)

    def inspect(self) -> None:
        self.require_words()
        self.ins, words = self.shape("codes")
        self.outs = words * len(AWQ_ORDER)
        self.symmetric = self.scheme.symmetric
        self.require_groups(self.shape("scale"), inputs_last=False)
        groups = group_count(self.ins, self.group)
        self.require_shape("scale", (groups, self.outs))
        if "zeros" in self.sources:
            self.require_shape("zeros", (groups, words))
        elif not self.symmetric:
            raise ValueError(f"{self.sources['codes']} has no zero points (qzeros), but zero_point is true")
        self.choose_format()

    def decode(self, raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        codes = unpack_words(raw["codes"].view(torch.int32), 4, 1, AWQ_ORDER).T  # [out, in]
        codes = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
        zero = None
        if "zeros" in raw:
            zero = unpack_words(raw["zeros"].view(torch.int32), 4, 1, AWQ_ORDER).T.contiguous()
        if self.symmetric and zero is not None:
            self.require_symmetric(zero)
            zero = None
        return codes, raw["scale"].T.contiguous(), zero


class PackedIntMatrix(_Integers):
    """Codes int32 [out, in / 8] packed along the inputs, scales [out, groups], zero points int32 [out / 8, groups]."""

    required = ("scale:weight_scale",)
    optional = ("zeros:weight_zero_point", "shape:weight_shape", "index:weight_g_idx")

    def inspect(self) -> None:
        self.require_words()
        if self.scheme.kind != "int":
            raise ValueError(f"{self.sources['codes']} is stored as integers, but declared as {self.scheme}")
        self.outs, words = self.shape("codes")
        pack = WORD_BITS // self.scheme.bits
        self.ins = words * pack
        self.symmetric = self.scheme.symmetric
        if self.scheme.group is None:
            self.require_shape("scale", (self.outs, 1), (self.outs,), (1,), (1, 1), ())
            self.group = self.ins
        else:
            self.require_groups(self.shape("scale"), inputs_last=True)
            self.require_shape("scale", (self.outs, group_count(self.ins, self.group)))
        if self.symmetric and "zeros" in self.sources:
            raise ValueError(f"{self.sources['codes']} has zero points, but is declared as symmetric")
        if not self.symmetric and "zeros" not in self.sources:
            raise ValueError(f"{self.sources['codes']} has no zero points, but is declared as asymmetric")
        if not self.symmetric:
            self.require_shape("zeros", (-(-self.outs // pack), group_count(self.ins, self.group)))
        self.choose_format()

    def decode(self, raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        if "shape" in raw and raw["shape"].flatten().tolist() not in ([self.outs, self.ins], []):
            raise ValueError(
                f"{self.sources['shape']} says {raw['shape'].tolist()}, but {self.sources['codes']} holds "
                f"{[self.outs, self.ins]}"
            )
        self.require_contiguous_groups(raw)
        scale = raw["scale"].reshape(-1, group_count(self.ins, self.group))
        scale = scale.expand(self.outs, -1).contiguous()
        zero = None
        if "zeros" in raw:
            zero = unpack_words(raw["zeros"].view(torch.int32), self.scheme.bits, 0)[: self.outs].contiguous()
        return words_as_bytes(raw["codes"].view(torch.int32)), scale, zero

    def stored_parts(self) -> dict[str, str] | None:
        # the lowest byte of a word comes first in a file: words of 4-bit codes are packed pairs
        plain = isinstance(self.format, Int4) and self.format.group == self.scheme.group and self.symmetric
        return {"codes": "codes", "scale": "scale"} if plain and "index" not in self.sources else None


class Int8Matrix(QuantizedMatrix):
    """Codes int8 [out, in], scales one per matrix, [out, 1] or [out, groups], perhaps zero points int8 alike."""

    required = ("scale:weight_scale",)
    optional = ("zeros:weight_zero_point",)

    def inspect(self) -> None:
        self.outs, self.ins = self.shape("codes")
        if (self.scheme.kind, self.scheme.bits) != ("int", 8):
            raise ValueError(f"{self.sources['codes']} is stored as int8, but declared as {self.scheme}")
        self.group = self.scheme.group or self.ins
        groups = group_count(self.ins, self.group)
        single = () if self.scheme.group else ((), (1,), (1, 1), (self.outs,))
        self.require_shape("scale", (self.outs, groups), *single)
        if not self.scheme.symmetric and "zeros" not in self.sources:
            raise ValueError(f"{self.sources['codes']} has no zero points, but is declared as asymmetric")
        if "zeros" in self.sources:
            self.require_dtype("zeros", "I8")
            self.require_shape("zeros", (self.outs, groups), *single)
        dtype = self.scale_dtype()
        self.format = None if "zeros" in self.sources else Int8(self.scheme.group or 0, dtype)

    def parts(self, raw: Mapping[str, Tensor]) -> Parts:
        return {"weight": raw["codes"], "scale": self._by_group(raw["scale"])}

    def dense(self, raw: Mapping[str, Tensor]) -> Tensor:
        if self.format is not None:
            return super().dense(raw)
        zero, scale = (
            self._by_group(raw[role]).float().repeat_interleave(self.group, dim=1)[:, : self.ins]
            for role in ("zeros", "scale")
        )
        return (raw["codes"].float() - zero) * scale

    def stored_parts(self) -> dict[str, str] | None:
        scales = self.outs * group_count(self.ins, self.group)
        plain = self.format is not None and math.prod(self.shape("scale")) == scales
        return {"weight": "codes", "scale": "scale"} if plain else None

    def _by_group(self, values: Tensor) -> Tensor:
        """Return one value per output and group."""
        values = values.reshape(-1, group_count(self.ins, self.group))
        return values.expand(self.outs, -1).contiguous()


class Fp8Matrix(QuantizedMatrix):
    """Codes e4m3 [out, in], scales one per matrix, per output or per block, multiplied; also powers of two."""

    required = ("scale:weight_scale_inv/weight_scale/scale/qscale_weight",)

    def inspect(self) -> None:
        self.require_dtype("codes", "F8_E4M3")
        self.require_dtype("scale", *_SCALE_DTYPES, *_EXPONENTS)
        if self.scheme.kind != "fp8":
            raise ValueError(f"{self.sources['codes']} is stored as fp8, but declared as {self.scheme}")
        self.outs, self.ins = self.shape("codes")
        found = self.shape("scale")
        if len(found) == 4 and found[1] == found[3] == 1:  # one scale per block, as ModelOpt stores them
            found = (found[0], found[2])
        self.rows, self.columns = self._block(found)
        self.format = Fp8(self.rows, self.columns, _SCALE_DTYPES.get(self._tensors["scale"].dtype, torch.float32))

    def _block(self, scale: tuple[int, ...]) -> tuple[int, int]:
        """Return the outputs and inputs that share a scale; 0 inputs are all."""
        rows, columns = self.scheme.block or _DEFAULT_BLOCK
        blocks = (-(-self.outs // rows), -(-self.ins // columns))
        if scale == blocks and self.scheme.block is not None:
            return rows, columns
        if math.prod(scale) == 1 or scale in ((self.outs,), (self.outs, 1)):
            return 1, 0
        if scale == blocks:
            return rows, columns
        exponents = self._tensors["scale"].dtype in _EXPONENTS
        if exponents and scale == (self.outs, -(-self.ins // 32)):  # mxfp8
            return 1, 32
        self.require_shape("scale", (), (1,), (self.outs, 1), blocks)
        raise AssertionError

    def parts(self, raw: Mapping[str, Tensor]) -> Parts:
        scale = raw["scale"]
        scale = _powers_of_two(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale
        return {"weight": raw["codes"], "scale": scale.reshape(-1, self._blocks[1]).expand(self._blocks).contiguous()}

    def stored_parts(self) -> dict[str, str] | None:
        plain = self._tensors["scale"].dtype in _SCALE_DTYPES and math.prod(self.shape("scale")) == math.prod(
            self._blocks
        )
        return {"weight": "codes", "scale": "scale"} if plain else None

    @property
    def _blocks(self) -> tuple[int, int]:
        return -(-self.outs // self.rows), -(-self.ins // (self.columns or self.ins))


class Mxfp4Matrix(QuantizedMatrix):
    """Codes [out, in / 2], two e2m1 values per byte, scales [out, in / 32] as exponents."""

    required = ("scale:weight_scale/scale",)

    def inspect(self) -> None:
        self.require_dtype("codes", "U8", "I8")
        self.require_dtype("scale", *_EXPONENTS)
        if self.scheme.kind not in ("mxfp4", "fp8"):  # fp8 checkpoints may have experts in fp4
            raise ValueError(f"{self.sources['codes']} is stored as mxfp4, but declared as {self.scheme}")
        self.outs, pairs = self.shape("codes")
        self.ins = 2 * pairs
        self.format = Mxfp4()
        if self.shape("scale") != (found := (self.outs, group_count(self.ins, 32))):
            raise ValueError(
                f"{self.sources['scale']} has shape {list(self.shape('scale'))}, but {list(found)} belongs to "
                f"mxfp4 and {self.sources['codes']} {list(self.shape('codes'))}"
            )

    def parts(self, raw: Mapping[str, Tensor]) -> Parts:
        return {"codes": raw["codes"].view(torch.uint8), "scale": raw["scale"].view(torch.uint8)}

    def stored_parts(self) -> dict[str, str] | None:
        return {"codes": "codes", "scale": "scale"}


class Mxfp4Blocks(QuantizedMatrix):
    """MXFP4 of gpt-oss: codes [out, in / 32, 16], scales [out, in / 32]; the dense tensor is [in, out]."""

    required = ("scale:scales",)
    code_dims = 3
    transposed = True

    def inspect(self) -> None:
        self.require_dtype("codes", "U8")
        self.require_dtype("scale", "U8")
        self.outs, groups, width = self.shape("codes")
        if width != 16:
            raise ValueError(f"{self.sources['codes']} has blocks of {width} bytes, but mxfp4 has 16")
        self.ins = 32 * groups
        self.require_shape("scale", (self.outs, groups))
        self.format = Mxfp4()

    def parts(self, raw: Mapping[str, Tensor]) -> Parts:
        return {"codes": raw["codes"].flatten(-2), "scale": raw["scale"]}

    def stored_parts(self) -> dict[str, str] | None:
        return {"codes": "codes", "scale": "scale"}


class Nvfp4Matrix(QuantizedMatrix):
    """Codes [out, in / 2], e4m3 scales [out, in / 16] and one float32 scale of the matrix; it divides or multiplies."""

    required = ("scale:weight_scale", "whole:weight_global_scale/weight_scale_2")

    def inspect(self) -> None:
        self.require_dtype("codes", "U8", "I8")
        self.require_dtype("scale", "F8_E4M3")
        self.require_dtype("whole", "F32")
        if self.scheme.kind != "nvfp4":
            raise ValueError(f"{self.sources['codes']} is stored as nvfp4, but declared as {self.scheme}")
        self.outs, pairs = self.shape("codes")
        self.ins = 2 * pairs
        self.require_shape("scale", (self.outs, group_count(self.ins, 16)))
        self.require_shape("whole", (), (1,), (1, 1))
        self.format = Nvfp4()

    def parts(self, raw: Mapping[str, Tensor]) -> Parts:
        whole = raw["whole"].float().reshape(1, 1)
        if self.sources["whole"].endswith("global_scale"):
            if not bool(whole):
                raise ValueError(f"{self.sources['whole']} is 0, and is divided by")
            whole = 1 / whole
        return {
            "codes": raw["codes"].view(torch.uint8),
            "scale": raw["scale"],
            "global_scale": whole.expand(self.outs, 1).contiguous(),
        }


def _ones(bits: int) -> int:
    """Return a word whose codes are all one."""
    return sum(1 << place for place in range(0, WORD_BITS, bits))


def _powers_of_two(scale: Tensor) -> Tensor:
    """Return 2^(byte - 127)."""  # uint8 or e8m0 -> float32
    return torch.exp2(scale.view(torch.uint8).float() - 127)


# ---- finding them


def find_matrices(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> dict[str, QuantizedMatrix]:
    """Find the quantized matrices by the names and headers of all tensors; keys are names of dense tensors.

    Raises ValueError if a matrix is incomplete, its tensors do not fit together or contradict the configuration.
    """
    found: dict[str, QuantizedMatrix] = {}
    for name, stored in tensors.items():
        encoding = _encoding(quantization, name, stored, tensors)
        if encoding is None:
            continue
        dense, stem = _dense_name(name)
        if dense in tensors and dense != name:
            raise ValueError(f"there are both {dense} and {name}, so it is unclear which is the weight")
        module = dense.removesuffix(".weight")
        sources = {"codes": name, **dict(_companions(encoding, name, stem, tensors))}
        found[dense] = encoding(dense, module, sources, tensors, quantization.scheme(module))
    if not found:
        raise ValueError(f"the configuration declares {quantization.method}, but no tensor is quantized")
    used = {source for matrix in found.values() for source in matrix.sources.values()}
    others = {name: stored for name, stored in tensors.items() if name not in used and not is_auxiliary(name)}
    for name, stored in others.items():
        if stored.dtype in _EIGHT_BIT_FLOATS or (stored.dtype in ("I8", "U8") and len(stored.shape) > 1):
            raise ValueError(f"{name} is stored as {stored.dtype}, which {quantization.method} does not explain")
    if orphans := [name for name in others if name.endswith(_PARTS_OF_WEIGHTS)]:
        raise ValueError(f"there is {orphans[0]}, but no quantized weight that it belongs to")
    return found


def undeclared(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return a tensor that only a quantized checkpoint has."""
    packed = (".qweight", ".weight_packed", "_proj_blocks")
    return next(
        (
            name
            for name, tensor in tensors.items()
            if name.endswith(packed) or (tensor.dtype in _EIGHT_BIT_FLOATS and name.endswith(("weight", "_proj")))
        ),
        None,
    )


def is_auxiliary(name: str) -> bool:
    """Return whether a tensor of a quantized checkpoint is no weight, such as the scale of activations."""
    return _AUXILIARY.search(name) is not None


def _encoding(
    quantization: Quantization, name: str, stored: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> type[QuantizedMatrix] | None:
    """Return the class of the matrix whose codes this tensor holds; None if it holds no codes."""
    method = quantization.method
    if is_auxiliary(name):
        return None
    if method in ("gptq", "awq"):
        if not name.endswith("qweight"):
            return None
        return AwqMatrix if method == "awq" else Gptq1Matrix if quantization.zero_offset else GptqMatrix
    if method == "mxfp4":
        return Mxfp4Blocks if name.endswith("_blocks") else None
    _, stem = _dense_name(name)
    if name.endswith("_packed") and method == "compressed-tensors":
        if stored.dtype != "U8":
            return PackedIntMatrix
        return Nvfp4Matrix if f"{stem}_global_scale" in tensors else Mxfp4Matrix
    if name.endswith(("_scale", "_scale_inv", "_scale_2", ".scale", "_zero_point", "_packed")):
        return None
    if stored.dtype in _EIGHT_BIT_FLOATS:
        return Fp8Matrix
    if stored.dtype == "U8" and method == "modelopt" and len(stored.shape) > 1:
        return Nvfp4Matrix
    if stored.dtype == "I8" and len(stored.shape) > 1:
        return Int8Matrix if method == "compressed-tensors" else Mxfp4Matrix if method == "fp8" else None
    return None


def _dense_name(name: str) -> tuple[str, str]:
    """Return the name of the dense tensor that codes stand for, and the start of the names of their other tensors."""
    if name.endswith("qweight"):
        base = name.removesuffix("qweight")  # ends with a dot, or with `_` for a fused parameter
        return (f"{base}weight" if base.endswith(".") else base.removesuffix("_")), base
    stem = name.removesuffix("_packed").removesuffix("_blocks")
    return stem, stem


def _companions(
    encoding: type[QuantizedMatrix], name: str, stem: str, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, str]]:
    """Yield role and name of the tensors that belong to codes; raise ValueError if a required one is missing."""
    for needed, roles in ((True, encoding.required), (False, encoding.optional)):
        for role, _, suffixes in (entry.partition(":") for entry in roles):
            candidates = [name for suffix in suffixes.split("/") for name in _companion_names(stem, suffix)]
            present = [candidate for candidate in candidates if candidate in tensors]
            if present:
                yield role, present[0]
            elif needed:
                kind = "scale" if role in ("scale", "whole") else role
                raise ValueError(f"it lacks the {kind} of {name} ({' or '.join(candidates)})")


def _companion_names(stem: str, suffix: str) -> list[str]:
    """Return possible names of a tensor beside `x.weight`, the fused parameter `x`, or `x.qweight`."""
    if stem.endswith((".", "_")):  # gptq, awq: x.scales
        return [f"{stem}{suffix}"]
    if stem.endswith(".weight"):
        short = suffix in ("scale", "qscale_weight")
        return [f"{stem.removesuffix('weight')}{suffix}" if short else f"{stem}_{suffix.removeprefix('weight_')}"]
    return list(dict.fromkeys((f"{stem}_{suffix.removeprefix('weight_')}", f"{stem}_{suffix}")))
