"""Widening: a small trained model becomes one of real size that computes the same function.

Hidden dimensions are added that stay exactly zero in the residual stream, feed-forward units and attention heads whose
output is exactly zero or read by nothing; weights that only ever meet those zeros are noise. Routing, acceptance and
prediction stay those of the trained model, while bytes, kernels and copies become those of the architecture named.
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
from spmoe.models.checkpoint import Checkpoint, quiet
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.load import store_spec
from spmoe.types import ExpertKey

_PERIOD = (1 << 20) + 7  # numbers after which noise repeats; no divisor of a row, or rows would repeat too
_FAINTEST = 1e-3  # scale of noise beside trained weights that are all zero, as biases can be

# which of a shape's sizes each size in a family's config becomes
_FEED_FORWARDS = {
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
    """The sizes of an architecture. Layers, vocabulary, number of experts and top-k stay the small model's."""

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
    """The config of the wide model, which reads at least `positions` positions."""
    if config.model_type not in _FEED_FORWARDS:
        raise UsageError(
            f"spmoe cannot widen a {config.model_type} model; choose one of these kinds: {', '.join(_FEED_FORWARDS)}"
        )
    if config.hidden_act != "silu" or config.rope_parameters["rope_type"] != "default":
        raise UsageError("spmoe can only widen models with SiLU feed-forwards and plain rotary positions")
    _Heads.of(config, shape)  # refuses heads that do not fit
    wide = copy.deepcopy(config)
    sizes = {"hidden_size": "hidden", **_FEED_FORWARDS[config.model_type]}
    for ours, theirs in sizes.items():
        _require_room(shape, ours, getattr(config, ours), getattr(shape, theirs))
        setattr(wide, ours, getattr(shape, theirs))
    wide.num_attention_heads = shape.heads
    wide.num_key_value_heads = shape.kv_heads
    wide.head_dim = shape.head_dim
    # the mean of squares shrinks as zeros join it; the norms' weights make up for the rest
    wide.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden
    wide.max_position_embeddings = max(config.max_position_embeddings, positions)
    return wide


def widen_draft(model: Any, shape: WideShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """The wide twin of a whole model: a dense draft, or an MoE model with every expert resident."""
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
            write(_columns(tensor), _columns(small.detach().to(device)))
        else:
            for expert in range(len(small)):
                experts.fill({leaf: small[expert]}, {leaf: tensor[expert]}, ExpertKey(layers[path], expert))
        wide.get_submodule(path).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    wide.tie_weights()
    for path, module in list(wide.named_modules()):
        if hasattr(module, "inv_freq"):  # what a rotary embedding computes from the config is still on the meta device
            wide.set_submodule(path, type(module)(config).to(device))
    if left := [name for name, tensor in (*wide.named_parameters(), *wide.named_buffers()) if tensor.is_meta]:
        raise UsageError(f"spmoe does not know how to widen {left[0]}; choose an unaltered model")
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def widen_target(model: Any, shape: WideShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """The wide twin of a model loaded without its experts, which stay out here too and go through (silent) ports."""
    wide = widen_draft(model, shape, dtype, device, seed)
    take_over(wide)
    return wide


def wide_store_spec(
    checkpoint: Checkpoint, wide: Any, paths: list[str], dtype: torch.dtype, shape: WideShape, seed: int = 0
) -> StoreSpec:
    """What a store of this checkpoint's widened experts holds; `wide` comes from `widen_target`."""
    spec = store_spec(checkpoint, wide, paths, dtype)
    return replace(spec, fingerprint=f"{checkpoint.fingerprint}:{shape.name}:{seed}")


class ExpertWidener:
    """Writes wide experts, of whatever size there is room for, from small ones.

    The same expert comes out for the same seed and key, on every device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        self._noise = _Noise(dtype, device, seed)
        self._stage: dict[str, Tensor] = {}

    def fill(self, small: Mapping[str, Tensor], views: Mapping[str, Tensor], key: ExpertKey) -> None:
        """Write one wide expert. Views may lie elsewhere: it is made on the widener's device, then copied."""
        # gate_up_proj: [2 ffn, hidden], down_proj: [hidden, ffn]
        for name, view in views.items():
            wide = self._room(name, view)
            self._noise.fill(wide, small[name], f"{key.layer}.{key.expert}.{name}")
            trained = small[name].detach().to(wide.device)
            if name == "gate_up_proj":
                (gate, up), (wide_gate, wide_up) = trained.chunk(2), wide.chunk(2)
                _quiet(wide_gate, gate)  # silu(0) * anything is 0
                _place(wide_up, up)
            elif name == "down_proj":
                _quiet(wide, trained)
            else:
                raise UsageError(f"spmoe does not know how to widen {name} of an expert")
            if wide is not view:
                view.copy_(wide)

    def _room(self, name: str, view: Tensor) -> Tensor:
        dtype, device = self._noise.dtype, self._noise.device
        if view.dtype == dtype and view.device == device:
            return view
        if name not in self._stage or self._stage[name].shape != view.shape:
            self._stage[name] = torch.empty(view.shape, dtype=dtype, device=device)
        return self._stage[name]


class _Noise:
    """Random numbers of any amount from one short buffer that every tensor reads from a place of its own.

    It costs no more than a copy. The buffer is drawn on the CPU, so that the numbers are the same on every device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self._buffer = torch.randn(2 * _PERIOD, generator=rng).to(device, dtype)
        self.dtype, self.device = self._buffer.dtype, self._buffer.device

    def fill(self, tensor: Tensor, like: Tensor, name: str) -> None:
        """Fill a tensor with noise as loud as another tensor's numbers."""
        scale = max(float(like.detach().float().square().mean().sqrt()), _FAINTEST)
        start = zlib.crc32(name.encode()) % _PERIOD
        window = self._buffer[start : start + _PERIOD]
        flat = tensor.view(-1)
        times, rest = divmod(flat.numel(), _PERIOD)
        torch.mul(window.expand(times, -1), scale, out=flat[: times * _PERIOD].view(times, _PERIOD))
        torch.mul(window[:rest], scale, out=flat[times * _PERIOD :])


@dataclass(frozen=True)
class _Heads:
    """Where the small model's heads are in the wide one.

    Dimension i of a head becomes dimension `ratio * i`, which turns at the same rotary frequency. Query heads that
    shared a KV head go to as few wide KV heads as hold them all, each of which has a copy of it.
    """

    scale: float  # of queries, for scores are divided by a larger head's square root
    queries: Tensor  # [heads * head_dim], wide rows of the small model's query rows
    in_use: Tensor  # [heads * wide head_dim], every row of those wide query heads
    keys: Tensor  # wide rows that hold a small KV row
    keys_from: Tensor  # that small row, for each
    spilled: Tensor  # wide query rows that no small head has, but whose KV head holds real values

    @classmethod
    def of(cls, config: Any, shape: WideShape) -> Self:
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        _require_room(shape, "head_dim", head_dim, shape.head_dim)
        _require_room(shape, "num_attention_heads", heads, shape.heads)
        if shape.head_dim % head_dim:
            raise UsageError(
                f"{shape.name} has heads of {shape.head_dim} and the model of {head_dim}: rotary frequencies only stay "
                "the same when one is a multiple of the other; choose another shape"
            )
        if shape.heads % shape.kv_heads:
            raise UsageError(f"{shape.name} has {shape.heads} heads, which {shape.kv_heads} KV heads cannot share")
        group, wide_group = heads // kv_heads, shape.heads // shape.kv_heads
        copies = -(-group // wide_group)  # of each KV head
        _require_room(shape, "num_key_value_heads", kv_heads * copies, shape.kv_heads)
        small_kv = torch.arange(kv_heads * copies) // copies  # for each wide KV head in use
        kv, turn = torch.arange(heads) // group, torch.arange(heads) % group
        places = (kv * copies + turn // wide_group) * wide_group + turn % wide_group  # of the query heads
        near = torch.arange(len(small_kv) * wide_group)  # every query head of those KV heads
        dims = torch.arange(head_dim)
        spread = dims * (shape.head_dim // head_dim)
        return cls(
            scale=math.sqrt(shape.head_dim / head_dim),
            queries=_rows(places, shape.head_dim, spread),
            in_use=_rows(places, shape.head_dim, torch.arange(shape.head_dim)),
            keys=_rows(torch.arange(len(small_kv)), shape.head_dim, spread),
            keys_from=_rows(small_kv, head_dim, dims),
            spilled=_rows(near[~torch.isin(near, places)], shape.head_dim, spread),
        )

    def query(self, wide: Tensor, small: Tensor) -> None:
        """Silent in the added dimensions of heads in use, for the keys there are noise."""
        # [heads * head_dim, hidden]
        wide[self.in_use, : small.shape[1]] = 0
        wide[self.queries, : small.shape[1]] = (small.float() * self.scale).to(wide.dtype)

    def key(self, wide: Tensor, small: Tensor) -> None:
        """A copy of the small KV head in every one that is in use."""  # [kv_heads * head_dim, hidden]
        wide[self.keys, : small.shape[1]] = small[self.keys_from].to(wide.dtype)

    def value(self, wide: Tensor, small: Tensor) -> None:
        """As keys, but added values are zero, and what the output projection makes of them does not matter."""
        wide[:, : small.shape[1]] = 0
        self.key(wide, small)

    def output(self, wide: Tensor, small: Tensor) -> None:
        """Nothing into the added hidden dimensions, and nothing from heads that see real values by accident."""
        # [hidden, heads * head_dim]
        wide[:, self.spilled] = 0
        wide[small.shape[0] :, self.queries] = 0
        wide[: small.shape[0], self.queries] = small.to(wide.dtype)


_Rule = Callable[[Tensor, Tensor], None]  # writes a small tensor, and the zeros it needs, into a wide one full of noise


def _rules(heads: _Heads) -> dict[str, _Rule]:
    """How to widen each parameter, by a pattern of its name."""
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
        rf"{layer}\.mlp\.(shared_expert\.)?(gate|down)_proj\.weight": _quiet,
        rf"{layer}\.mlp\.(shared_expert\.)?up_proj\.weight": _place,
    }


def _rule(rules: Mapping[str, _Rule], name: str) -> _Rule:
    for pattern, rule in rules.items():
        if re.fullmatch(pattern, name):
            return rule
    kinds = " or ".join(_FEED_FORWARDS)
    raise UsageError(f"spmoe does not know how to widen {name}; choose an unaltered {kinds} model")


def _place(wide: Tensor, small: Tensor) -> None:
    """What only reads: the added columns meet zeros, and nobody listens to the added rows."""  # [rows, columns]
    wide[: small.shape[0], : small.shape[1]] = small.to(wide.dtype)


def _quiet(wide: Tensor, small: Tensor) -> None:
    """As that, where the added rows must answer with zero."""  # [rows, columns]
    wide[small.shape[0] :, : small.shape[1]] = 0
    _place(wide, small)


def _embed(wide: Tensor, small: Tensor) -> None:
    """Where the added dimensions begin, as zeros."""  # [vocabulary, hidden]
    wide[:, small.shape[1] :] = 0
    _place(wide, small)


def _norm(wide: Tensor, small: Tensor) -> None:
    """A smaller weight, for what is divided by the root mean square over more dimensions is larger."""  # [hidden, 1]
    _place(wide, small.float() * math.sqrt(len(small) / len(wide)))


def _columns(tensor: Tensor) -> Tensor:
    """Weights as they are; a norm or a bias as a single column."""  # -> [rows, columns]
    return tensor if tensor.ndim > 1 else tensor[:, None]


def _rows(heads: Tensor, head_dim: int, dims: Tensor) -> Tensor:
    """These dimensions of these heads, as rows of a projection."""  # [heads], [dims] -> [heads * dims]
    return (heads[:, None] * head_dim + dims).flatten()


def _require_room(shape: WideShape, what: str, needed: int, there: int) -> None:
    if there < needed:
        raise UsageError(f"{shape.name} is too small: {what} is {there}, but this model needs at least {needed}")
