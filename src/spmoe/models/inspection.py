"""Inspection: where a model's pre-FFN norms, routers and experts are, discovered by watching one small forward.

Nothing is known of families. Tensors are followed by identity: the router is the module whose output holds the very
indices the experts receive, the norm is the module whose output is what the router (or a dense feed-forward) is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spmoe.errors import CheckpointError
from spmoe.models.experts_seam import experts_modules
from spmoe.models.kv import KvState

PROBE_TOKENS = 3  # few, but more than one: shapes of one row are ambiguous


@dataclass(frozen=True)
class RouterCall:
    """A router and the arguments it was called with, so that it can be called alone on other hidden states."""

    router: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: bool  # whether hidden states come as [rows, hidden] rather than [batch, rows, hidden]
    order: tuple[int, int, int] = (0, 1, 2)  # places of logits, weights and experts in what it returns

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chosen experts, their weights, and every expert's logit."""
        # hidden: [rows, hidden] -> [rows, top_k], [rows, top_k], [rows, experts]
        given = hidden if self.flat else hidden[None]
        answer = self.router(given, *self.args, **self.kwargs)
        logits, weights, experts = (answer[place].reshape(hidden.shape[0], -1) for place in self.order)
        return experts, weights, logits

    def works_alone(self, given: Tensor, top_k: int) -> bool:
        """Whether it answers for another number of rows than it was seen with."""
        rows = given.reshape(-1, given.shape[-1])[:1].expand(PROBE_TOKENS + 1, -1)
        try:
            with torch.inference_mode():
                experts, weights, _ = self(rows)
        except Exception:  # arguments that belong to the rows it was seen with
            return False
        return experts.shape == weights.shape == (PROBE_TOKENS + 1, top_k)


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer of a target."""

    path: str  # of the experts module
    depth: int  # decoder layer
    experts: nn.Module
    top_k: int
    norm: nn.Module | None  # None: nothing to feed another model's hidden states through
    router: RouterCall | None


@dataclass(frozen=True)
class Inspection:
    """What was found in a model."""

    depth_count: int
    norms: tuple[nn.Module | None, ...]  # the pre-FFN norm of each decoder layer; its input is the tap
    moe: tuple[MoeLayer, ...]  # in the order a forward reaches them
    kv_bytes_per_token: int
    resumes: bool  # whether its state can be continued by several tokens at once, and put back


@dataclass(frozen=True)
class _Call:
    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def given(self) -> Tensor | None:
        """The first tensor argument."""
        return next((a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor)), None)

    @property
    def outputs(self) -> list[Tensor]:
        """Every tensor returned."""
        found = self.output if isinstance(self.output, (tuple, list)) else (self.output,)
        return [t for t in found if isinstance(t, Tensor)]


def inspect_model(model: Any) -> Inspection:
    """Run a few tokens through the model and see what feeds what."""
    layers_path, depth_count = _decoder_layers(model)
    kv = KvState(model.config, PROBE_TOKENS)
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    with _watch(model) as calls, torch.inference_mode():
        model(input_ids=tokens, past_key_values=kv.cache, use_cache=True)
    paths = dict(experts_modules(model))
    moe = tuple(_moe_layer(calls, i, layers_path) for i, call in enumerate(calls) if call.path in paths)
    known = {moe_layer.depth: moe_layer.norm for moe_layer in moe if not isinstance(moe_layer.norm, nn.Identity)}
    norms = tuple(known.get(d) or _ffn_norm(calls, f"{layers_path}.{d}") for d in range(depth_count))
    return Inspection(depth_count, norms, moe, kv.bytes_per_token, kv.can_rewind or _resumes(model))


def _resumes(model: Any) -> bool:
    """Try on a few tokens whether a state of its own kind takes several at once, and goes back to a mark."""
    if model.device.type == "meta":
        return True  # nothing can be tried there; it is only looked at
    count = model.get_input_embeddings().num_embeddings
    start, wrong, right = ([i % count for i in ids] for ids in (range(7, 12), range(21, 24), range(40, 48)))

    def run(tokens: list[int], kv: KvState) -> Tensor:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=model.device)
            output = model(input_ids=ids, past_key_values=kv.cache, use_cache=True).logits[0]
        kv.length += len(tokens)
        return output.float()  # type: ignore[no-any-return]

    whole, kv = (KvState(model.config, len(start) + len(right)) for _ in range(2))
    expected = run(start + right, whole)[-len(right) :]
    try:
        run(start, kv)
        kv.snapshot()
        run(wrong, kv)
        kv.rewind(len(start))
        kv.snapshot()
        at_once = run(right, kv)
        kv.rewind(len(start))
        one_by_one = torch.cat([run([token], kv) for token in right])
    except Exception:  # whatever a model's own code makes of it
        return False
    eps = torch.finfo(model.dtype).eps
    most = min(512 * eps, eps**0.5) * expected.norm()  # rounding, but nothing that was left out
    return all(bool((found - expected).norm() < most) for found in (at_once, one_by_one))


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[_Call]]:
    """Record every module call, in order of completion. The record keeps tensors alive, so identity is safe."""
    calls: list[_Call] = []

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append(_Call(path, module, args, kwargs, output))

        return hook

    handles = [
        module.register_forward_hook(note(path), with_kwargs=True) for path, module in model.named_modules() if path
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: Any) -> tuple[str, int]:
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return path, wanted
    raise CheckpointError(f"no list of {wanted} decoder layers was found in {type(model).__name__}")


def _moe_layer(calls: list[_Call], index: int, layers_path: str) -> MoeLayer:
    experts = calls[index]
    chosen = experts.args[1] if len(experts.args) > 1 else experts.kwargs["top_k_index"]
    moe_layer: dict[str, Any] = {
        "path": experts.path,
        "depth": int(experts.path.removeprefix(layers_path + ".").partition(".")[0]),
        "experts": experts.module,
        "top_k": chosen.shape[-1],
        "norm": None,
        "router": None,
    }
    router = next(
        (c for c in reversed(calls[:index]) if len(c.outputs) >= 3 and any(_same(t, chosen) for t in c.outputs)), None
    )
    if router is not None and router.given is not None and router.args and router.given is router.args[0]:
        flat, order = router.given.ndim == 2, _places(router.output, chosen)
        call = RouterCall(router.module, router.args[1:], router.kwargs, flat, order)
        moe_layer["router"] = call if call.works_alone(router.given, moe_layer["top_k"]) else None
        moe_layer["norm"] = _before_router(calls[:index], router.given)
    return MoeLayer(**moe_layer)


def _places(output: Sequence[Any], chosen: Tensor) -> tuple[int, int, int]:
    """Where a router returns logits, weights and experts: the experts are known, and weights come one for each."""
    experts = next(i for i, t in enumerate(output) if isinstance(t, Tensor) and _same(t, chosen))
    floats = [i for i, t in enumerate(output) if isinstance(t, Tensor) and t.is_floating_point()]
    weights = [i for i in floats if output[i].numel() == chosen.numel()]
    weight = weights[0] if len(weights) == 1 else 1
    return next((i for i in floats if i != weight), weight), weight, experts


def _before_router(calls: list[_Call], given: Tensor) -> nn.Module | None:
    """What makes a router's input of the residual stream: a norm, simple or gated, or nothing at all."""
    makers = [c for c in calls if any(_same_storage(t, given) for t in c.outputs)]
    if not makers:
        return nn.Identity()
    return _producer(makers, given) or next((c.module for c in makers if _holds_norm(c, calls)), None)


def _holds_norm(call: _Call, calls: list[_Call]) -> bool:
    """A module that normalises its one input, and goes on from there."""
    tensors = [a for a in (*call.args, *call.kwargs.values(), call.output) if isinstance(a, Tensor)]
    if len(call.args) != 1 or len(tensors) != 2 or tensors[0].shape != tensors[1].shape:
        return False
    inner = [c for c in calls if c.path.startswith(f"{call.path}.") and c.given is call.given]
    return any(_is_norm(c) for c in inner)


def _ffn_norm(calls: list[_Call], layer_path: str) -> nn.Module | None:
    """The norm before a decoder layer's last block that is not itself a norm; the block, where it reads the stream."""
    children = [c for c in calls if c.path.rpartition(".")[0] == layer_path]
    blocks = [c for c in children if not _is_norm(c) and not _hands_on(c)]
    if not blocks or (given := blocks[-1].given) is None:
        return None
    made = any(_same_storage(output, given) for call in calls for output in call.outputs)
    if not made and blocks[-1].args:  # a hook sees only what is not given by name
        return blocks[-1].module
    return _producer(children, given)


def _hands_on(call: _Call) -> bool:
    """Whether it returns what it was given, as dropout does."""
    return bool(call.outputs) and call.given is not None and _same_storage(call.outputs[0], call.given)


def _producer(calls: list[_Call], tensor: Tensor) -> nn.Module | None:
    """The norm whose output this tensor is (or is a view of)."""
    return next((c.module for c in calls if _is_norm(c) and _same_storage(c.outputs[0], tensor)), None)


def _is_norm(call: _Call) -> bool:
    """A leaf with nothing but vectors for weights, whose output is a new tensor of its input's shape."""
    if any(True for _ in call.module.children()) or len(call.outputs) != 1 or call.given is None:
        return False
    weights = list(call.module.parameters(recurse=False))
    changed = call.outputs[0].shape == call.given.shape and not _same_storage(call.outputs[0], call.given)
    return changed and all(w.ndim == 1 for w in weights)


def _same(a: Tensor, b: Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype and a.storage_offset() == b.storage_offset()
    return a is b or (alike and _same_storage(a, b))


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)  # on the meta device all addresses are 0
