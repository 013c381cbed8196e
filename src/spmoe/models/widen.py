"""Widen a small trained model to a real architecture's sizes, so that it computes the same function at the real cost.

The added hidden dimensions stay exactly zero in the residual stream. The output of every added FFN unit and attention
head is exactly zero or is multiplied by zero weights. All weights that only meet those zeros are noise, so that memory,
kernels and copies are those of the named architecture, while routing, acceptance and prediction stay the trained ones.
"""

from __future__ import annotations

import copy
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from spmoe.errors import UsageError
from spmoe.experts.store import StoreSpec
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint, quiet
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.load import store_spec
from spmoe.types import ExpertKey

_PERIOD = (1 << 20) + 7  # values after which noise repeats; not a multiple of a row's length, or rows would be equal
_MIN_NOISE = 1e-3  # scale of the noise if the trained weights are all zero, as biases can be

# for each family: its config's FFN sizes, and the field of WideShape that replaces each
_FFN_SIZES = {
    "mistral": {"intermediate_size": "dense_ffn"},
    "mixtral": {"intermediate_size": "ffn"},
    "qwen2_moe": {
        "moe_intermediate_size": "ffn",
        "shared_expert_intermediate_size": "shared_ffn",
        "intermediate_size": "dense_ffn",
    },
}


@dataclass(frozen=True, slots=True)
class WideShape:
    """The sizes of an architecture. Layers, vocabulary, number of experts and top-k stay those of the small model."""

    name: str
    hidden: int
    ffn: int  # of one expert
    dense_ffn: int  # of a dense model
    shared_ffn: int  # of a shared expert
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    shape.name: shape
    for shape in (
        WideShape("mixtral-8x7b", 4096, 14336, 14336, 14336, 32, 8, 128),
        WideShape("phi-3.5-moe", 4096, 6400, 6400, 6400, 32, 8, 128),
        WideShape("deepseek-v2-lite", 2048, 1408, 10944, 2816, 16, 16, 128),
    )
}


def wide_config(config: Any, shape: WideShape, positions: int = 32768) -> Any:
    """Return the configuration of the wide model, with a context of at least `positions` tokens."""
    if config.model_type not in _FFN_SIZES:
        raise UsageError(
            f"spmoe cannot widen a {config.model_type} model; choose one of these kinds: {', '.join(_FFN_SIZES)}"
        )
    if config.hidden_act != "silu" or config.rope_parameters["rope_type"] != "default":
        raise UsageError("spmoe can only widen models with SiLU feed-forwards and plain rotary positions")
    _Heads.of(config, shape)  # raises if the heads do not fit
    wide = copy.deepcopy(config)
    sizes = {"hidden_size": "hidden", **_FFN_SIZES[config.model_type]}
    for ours, theirs in sizes.items():
        _require_at_least(shape, ours, getattr(config, ours), getattr(shape, theirs))
        setattr(wide, ours, getattr(shape, theirs))
    wide.num_attention_heads = shape.heads
    wide.num_key_value_heads = shape.kv_heads
    wide.head_dim = shape.head_dim
    # added zeros shrink the mean of squares, so epsilon must shrink too; `_norm` scales the norms' weights to match
    wide.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden
    wide.max_position_embeddings = max(config.max_position_embeddings, positions)
    return wide


def widen_draft(model: Any, shape: WideShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """Widen a model with all its weights: a dense draft, or an MoE model with every expert in memory."""
    config = wide_config(model.config, shape)
    config.dtype = dtype
    with torch.device("meta"), quiet():
        wide = type(model)(config)
    rules = _rules(_Heads.of(model.config, shape))
    noise = _Noise(dtype, device, seed)
    experts = ExpertWidener(dtype, device, seed)
    layers = {path: layer for layer, (path, _) in enumerate(experts_modules(model))}
    for name, small in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        write = None if path in layers else _rule(rules, name)
        tensor = torch.empty(wide.get_parameter(name).shape, dtype=dtype, device=device)
        if write is not None:
            noise.fill(tensor, small, name)
            write(_as_matrix(tensor), _as_matrix(small.detach().to(device)))
        else:
            for expert in range(len(small)):
                experts.fill({leaf: small[expert]}, {leaf: tensor[expert]}, ExpertKey(layers[path], expert))
        wide.get_submodule(path).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    wide.tie_weights()
    for path, module in list(wide.named_modules()):
        if hasattr(module, "inv_freq"):  # computed from the config, and still on the meta device: build it again
            wide.set_submodule(path, type(module)(config).to(device))
    if left := [name for name, tensor in (*wide.named_parameters(), *wide.named_buffers()) if tensor.is_meta]:
        raise UsageError(f"spmoe does not know how to widen {left[0]}; choose an unmodified model")
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def widen_target(model: Any, shape: WideShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """Widen a model loaded without experts; the wide one has none either, and they return zeros until attached."""
    wide = widen_draft(model, shape, dtype, device, seed)
    take_over(wide)
    return wide


def wide_store_spec(
    checkpoint: Checkpoint,
    wide: Any,
    paths: list[str],
    dtype: torch.dtype,
    shape: WideShape,
    seed: int = 0,
    format: ExpertFormat | None = None,
) -> StoreSpec:
    """Describe a store of this checkpoint's widened experts; `wide` comes from `widen_target`."""
    spec = store_spec(checkpoint, wide, paths, dtype, format)
    return replace(spec, fingerprint=f"{checkpoint.fingerprint}:{shape.name}:{seed}")


class ExpertWidener:
    """Writes wide experts of any size from small ones. The result depends on seed and key only, not on the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        self._noise = _Noise(dtype, device, seed)
        self._buffers: dict[str, Tensor] = {}

    def fill(self, small: Mapping[str, Tensor], views: Mapping[str, Tensor], key: ExpertKey) -> None:
        """Write one wide expert into views; it is computed on the widener's device and copied if they are elsewhere."""
        # gate_up_proj: [2 ffn, hidden], down_proj: [hidden, ffn]
        for name, view in views.items():
            wide = self._buffer(name, view)
            self._noise.fill(wide, small[name], f"{key.layer}.{key.expert}.{name}")
            trained = small[name].detach().to(wide.device)
            if name == "gate_up_proj":
                (gate, up), (wide_gate, wide_up) = trained.chunk(2), wide.chunk(2)
                _place_with_zero_rows(wide_gate, gate)  # added units output silu(0) * up = 0
                _place(wide_up, up)
            elif name == "down_proj":
                _place_with_zero_rows(wide, trained)
            else:
                raise UsageError(f"spmoe does not know how to widen {name} of an expert")
            if wide is not view:
                view.copy_(wide)

    def _buffer(self, name: str, view: Tensor) -> Tensor:
        """Return the view itself if the widener can write to it, else a reused tensor of its shape."""
        dtype, device = self._noise.dtype, self._noise.device
        if view.dtype == dtype and view.device == device:
            return view
        if name not in self._buffers or self._buffers[name].shape != view.shape:
            self._buffers[name] = torch.empty(view.shape, dtype=dtype, device=device)
        return self._buffers[name]


class _Noise:
    """Random values for tensors of any size, copied from one buffer at an offset that depends on the tensor's name.

    A copy is much cheaper than drawing random numbers. The buffer is drawn on the CPU, so that all devices agree.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self._buffer = torch.randn(2 * _PERIOD, generator=rng).to(device, dtype)
        self.dtype, self.device = self._buffer.dtype, self._buffer.device

    def fill(self, tensor: Tensor, like: Tensor, name: str) -> None:
        """Fill a tensor with noise of another tensor's root mean square."""
        scale = max(float(like.detach().float().square().mean().sqrt()), _MIN_NOISE)
        start = zlib.crc32(name.encode()) % _PERIOD
        window = self._buffer[start : start + _PERIOD]
        flat = tensor.view(-1)
        times, rest = divmod(flat.numel(), _PERIOD)
        torch.mul(window.expand(times, -1), scale, out=flat[: times * _PERIOD].view(times, _PERIOD))
        torch.mul(window[:rest], scale, out=flat[times * _PERIOD :])


@dataclass(frozen=True)
class _Heads:
    """Places of the small model's attention heads in the wide one, and how to write the four projections.

    Dimension i of a head becomes dimension `ratio * i`, which has the same rotary frequency. Query heads that share a
    KV head go to as few wide KV heads as can hold them; each of those gets a copy of the small KV head.
    """

    scale: float  # of queries: scores are divided by the square root of the larger head_dim
    queries: Tensor  # [heads * head_dim], wide rows of the small model's query rows
    in_use: Tensor  # [heads * wide head_dim], all rows of those wide query heads
    keys: Tensor  # wide rows that hold a copy of a small KV row
    keys_from: Tensor  # the small row of each
    unused: Tensor  # rows of wide query heads without a small head, but whose KV head holds real values

    @classmethod
    def of(cls, config: Any, shape: WideShape) -> Self:
        """Place the heads of a configuration in a shape; raises UsageError if they do not fit."""
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        _require_at_least(shape, "head_dim", head_dim, shape.head_dim)
        _require_at_least(shape, "num_attention_heads", heads, shape.heads)
        if shape.head_dim % head_dim:
            raise UsageError(
                f"{shape.name} has head_dim {shape.head_dim}, which is not a multiple of the model's {head_dim}, so "
                "rotary frequencies would change; choose another shape"
            )
        if shape.heads % shape.kv_heads:
            raise UsageError(f"{shape.name} has {shape.heads} heads, which {shape.kv_heads} KV heads cannot share")
        group, wide_group = heads // kv_heads, shape.heads // shape.kv_heads
        copies = -(-group // wide_group)  # of each KV head
        _require_at_least(shape, "num_key_value_heads", kv_heads * copies, shape.kv_heads)
        small_kv = torch.arange(kv_heads * copies) // copies  # small KV head of each wide KV head in use
        kv, in_group = torch.arange(heads) // group, torch.arange(heads) % group
        wide_heads = (kv * copies + in_group // wide_group) * wide_group + in_group % wide_group  # of the query heads
        sharing = torch.arange(len(small_kv) * wide_group)  # all query heads of the KV heads in use
        dims = torch.arange(head_dim)
        wide_dims = dims * (shape.head_dim // head_dim)
        return cls(
            scale=math.sqrt(shape.head_dim / head_dim),
            queries=_rows(wide_heads, shape.head_dim, wide_dims),
            in_use=_rows(wide_heads, shape.head_dim, torch.arange(shape.head_dim)),
            keys=_rows(torch.arange(len(small_kv)), shape.head_dim, wide_dims),
            keys_from=_rows(small_kv, head_dim, dims),
            unused=_rows(sharing[~torch.isin(sharing, wide_heads)], shape.head_dim, wide_dims),
        )

    def query(self, wide: Tensor, small: Tensor) -> None:
        """Write q_proj: zero in the added dimensions of heads in use, since the keys are noise there."""
        # [heads * head_dim, hidden]
        wide[self.in_use, : small.shape[1]] = 0
        wide[self.queries, : small.shape[1]] = (small.float() * self.scale).to(wide.dtype)

    def key(self, wide: Tensor, small: Tensor) -> None:
        """Write k_proj: a copy of the small KV head in every wide one in use."""  # [kv_heads * head_dim, hidden]
        wide[self.keys, : small.shape[1]] = small[self.keys_from].to(wide.dtype)

    def value(self, wide: Tensor, small: Tensor) -> None:
        """Write v_proj: as k_proj, with zero for the added values, so that o_proj may hold noise there."""
        wide[:, : small.shape[1]] = 0
        self.key(wide, small)

    def output(self, wide: Tensor, small: Tensor) -> None:
        """Write o_proj: zero for the added hidden dimensions, and for unused heads whose values are not zero."""
        # [hidden, heads * head_dim]
        wide[:, self.unused] = 0
        wide[small.shape[0] :, self.queries] = 0
        wide[: small.shape[0], self.queries] = small.to(wide.dtype)


_Rule = Callable[[Tensor, Tensor], None]  # writes a small tensor, and the zeros it needs, into a wide one full of noise


def _rules(heads: _Heads) -> dict[str, _Rule]:
    """Return how to widen each parameter, by a pattern of its name."""
    layer = r"model\.layers\.\d+"
    return {
        r"model\.embed_tokens\.weight": _embed,
        r"lm_head\.weight": _place,
        rf"(model|{layer})\.((input|post_attention)_layer)?norm\.weight": _norm,
        rf"{layer}\.self_attn\.q_proj\.(weight|bias)": heads.query,
        rf"{layer}\.self_attn\.k_proj\.(weight|bias)": heads.key,
        rf"{layer}\.self_attn\.v_proj\.(weight|bias)": heads.value,
        rf"{layer}\.self_attn\.o_proj\.weight": heads.output,
        rf"{layer}\.mlp\.(shared_expert_)?gate\.weight": _place,
        rf"{layer}\.mlp\.(shared_expert\.)?(gate|down)_proj\.weight": _place_with_zero_rows,
        rf"{layer}\.mlp\.(shared_expert\.)?up_proj\.weight": _place,
    }


def _rule(rules: Mapping[str, _Rule], name: str) -> _Rule:
    for pattern, rule in rules.items():
        if re.fullmatch(pattern, name):
            return rule
    kinds = " or ".join(_FFN_SIZES)
    raise UsageError(f"spmoe does not know how to widen {name}; choose an unmodified {kinds} model")


def _place(wide: Tensor, small: Tensor) -> None:
    """Write the trained weights; added columns multiply zeros, and the outputs of added rows are not used."""
    # [rows, columns]
    wide[: small.shape[0], : small.shape[1]] = small.to(wide.dtype)


def _place_with_zero_rows(wide: Tensor, small: Tensor) -> None:
    """Write the trained weights where the outputs of added rows must be zero."""  # [rows, columns]
    wide[small.shape[0] :, : small.shape[1]] = 0
    _place(wide, small)


def _embed(wide: Tensor, small: Tensor) -> None:
    """Write embeddings; the residual stream starts with zeros in the added dimensions."""  # [vocabulary, hidden]
    wide[:, small.shape[1] :] = 0
    _place(wide, small)


def _norm(wide: Tensor, small: Tensor) -> None:
    """Write a norm's weight, scaled down since the root mean square is smaller over more dimensions."""  # [hidden, 1]
    _place(wide, small.float() * math.sqrt(len(small) / len(wide)))


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return weights as they are, and a norm or bias as a single column."""  # -> [rows, columns]
    return tensor if tensor.ndim > 1 else tensor[:, None]


def _rows(heads: Tensor, head_dim: int, dims: Tensor) -> Tensor:
    """Return the rows of a projection that hold these dimensions of these heads."""
    # [heads], [dims] -> [heads * dims]
    return (heads[:, None] * head_dim + dims).flatten()


def _require_at_least(shape: WideShape, name: str, needed: int, available: int) -> None:
    if available < needed:
        raise UsageError(f"{shape.name} is too small: {name} is {available}, but this model needs at least {needed}")
