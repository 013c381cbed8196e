"""Inspection: find a model's pre-FFN norms, routers and experts by hooking one small forward.

Nothing depends on the model family. A forward hook on every module stores its inputs and outputs, and modules are then
connected by tensor identity (same storage):

- the experts module is known from transformers' experts interface;
- its router is the module that returned the very tensor of expert indices that the experts module received;
- the pre-FFN norm is the module that returned the tensor that the router, or a dense feed-forward block, received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_settings

from spmoe.errors import CheckpointError
from spmoe.models.experts_seam import experts_modules
from spmoe.models.kv import KvState, position_arguments

PROBE_TOKENS = 3  # more than one, since shapes with one row are ambiguous


@dataclass(frozen=True)
class RouterCall:
    """A router with its other arguments, so that it can be called alone on any hidden states."""

    router: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: bool  # whether it takes hidden states as [rows, hidden], not [batch, rows, hidden]
    order: tuple[int, int, int] = (0, 1, 2)  # indices of logits, weights and experts in its output

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return routed experts, their weights, and the logits of all experts."""
        # hidden: [rows, hidden] -> [rows, top_k], [rows, top_k], [rows, experts]
        states = hidden if self.flat else hidden[None]
        output = self.router(states, *self.args, **self.kwargs)
        logits, weights, experts = (output[index].reshape(hidden.shape[0], -1) for index in self.order)
        return experts, weights, logits

    def works_alone(self, given: Tensor, top_k: int) -> bool:
        """Return whether the router also works for another number of rows than in the inspected forward."""
        rows = given.reshape(-1, given.shape[-1])[:1].expand(PROBE_TOKENS + 1, -1)
        try:
            with torch.inference_mode():
                experts, weights, _ = self(rows)
        except Exception:  # its other arguments belong to the rows of the inspected forward
            return False
        return experts.shape == weights.shape == (PROBE_TOKENS + 1, top_k)


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer of a target."""

    path: str  # of the experts module
    depth: int  # index of its decoder layer
    experts: nn.Module
    top_k: int
    norm: nn.Module | None  # maps the residual stream to the router's input; None if it was not found
    router: RouterCall | None  # None if it was not found or cannot be called alone


@dataclass(frozen=True)
class Inspection:
    """The structure of a model."""

    depth_count: int  # number of decoder layers
    norms: tuple[nn.Module | None, ...]  # pre-FFN norm of each decoder layer; its input is the residual stream
    moe: tuple[MoeLayer, ...]  # in the order of execution
    kv_bytes_per_token: int
    resumes: bool  # whether its state can be extended by several tokens at once, and restored


@dataclass(frozen=True)
class _Call:
    """One module call of the inspected forward."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def given(self) -> Tensor | None:
        """Return the first tensor argument."""
        return next((a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor)), None)

    @property
    def outputs(self) -> list[Tensor]:
        """Return all tensors of the output."""
        found = self.output if isinstance(self.output, (tuple, list)) else (self.output,)
        return [t for t in found if isinstance(t, Tensor)]


def inspect_model(model: Any) -> Inspection:
    """Run a few tokens through the model and find its norms, routers and experts."""
    layers_path, depth_count = _decoder_layers(model)
    kv = KvState(model.config, PROBE_TOKENS)
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    with _hooked(model) as calls, torch.inference_mode(), _shapes_only(model):
        model(input_ids=tokens, past_key_values=kv.cache, use_cache=True)
    paths = dict(experts_modules(model))
    moe = tuple(_moe_layer(calls, i, layers_path) for i, call in enumerate(calls) if call.path in paths)
    known = {moe_layer.depth: moe_layer.norm for moe_layer in moe if not isinstance(moe_layer.norm, nn.Identity)}
    width = model.get_input_embeddings().weight.shape[-1]
    norms = tuple(known.get(d) or _ffn_norm(calls, f"{layers_path}.{d}", width) for d in range(depth_count))
    return Inspection(depth_count, norms, moe, kv.bytes_per_token, kv.can_rewind or _resumes(model))


@contextmanager
def _shapes_only(model: Any) -> Iterator[None]:
    """Let a model on the meta device run although it looks at values: at positions, or at which of them count."""
    if model.device.type != "meta":
        yield
        return
    dynamic = [one for one in model.modules() if "dynamic" in str(getattr(one, "rope_type", ""))]
    before = [one.rope_type for one in dynamic]
    for one in dynamic:
        one.rope_type = "default"  # else it compares the largest position with the context
    try:
        with shape_settings.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            yield
    finally:
        for one, rope_type in zip(dynamic, before, strict=True):
            one.rope_type = rope_type


def _resumes(model: Any) -> bool:
    """Try whether a state that is not only keys and values takes several tokens at once and can be restored.

    Compares the logits of one forward over all tokens with those of a state that was extended by wrong tokens,
    restored, and then extended by the right tokens, at once and one by one.
    """
    if model.device.type == "meta":
        return True  # a model without weights cannot run, and is only inspected
    count = model.get_input_embeddings().num_embeddings
    start, wrong, right = ([i % count for i in ids] for ids in (range(7, 12), range(21, 24), range(40, 48)))

    def run(tokens: list[int], kv: KvState) -> Tensor:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=model.device)
            positions = position_arguments(model, ids, kv.length)
            output = model(input_ids=ids, past_key_values=kv.cache, use_cache=True, **positions).logits[0]
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
    except Exception:  # any failure of the model's own code
        return False
    eps = torch.finfo(model.dtype).eps
    tolerance = min(512 * eps, eps**0.5) * expected.norm()  # allows rounding, but no missing token
    return all(bool((found - expected).norm() < tolerance) for found in (at_once, one_by_one))


@contextmanager
def _hooked(model: nn.Module) -> Iterator[list[_Call]]:
    """Collect every module call in order of completion. The list keeps tensors alive, so no storage is reused."""
    calls: list[_Call] = []

    def hook_for(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append(_Call(path, module, args, kwargs, output))

        return hook

    handles = [
        module.register_forward_hook(hook_for(path), with_kwargs=True) for path, module in model.named_modules() if path
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: Any) -> tuple[str, int]:
    """Return the path and length of the list of decoder layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, count
    raise CheckpointError(f"no list of {count} decoder layers was found in {type(model).__name__}")


def _moe_layer(calls: list[_Call], index: int, layers_path: str) -> MoeLayer:
    """Describe the MoE layer whose experts module made call number `index`."""
    experts = calls[index]
    routed = experts.args[1] if len(experts.args) > 1 else experts.kwargs["top_k_index"]
    moe_layer: dict[str, Any] = {
        "path": experts.path,
        "depth": int(experts.path.removeprefix(layers_path + ".").partition(".")[0]),
        "experts": experts.module,
        "top_k": routed.shape[-1],
        "norm": None,
        "router": None,
    }
    router = next(
        (c for c in reversed(calls[:index]) if len(c.outputs) >= 3 and any(_same(t, routed) for t in c.outputs)), None
    )
    if router is not None and router.given is not None and router.args and router.given is router.args[0]:
        flat, order = router.given.ndim == 2, _output_order(router.output, routed)
        call = RouterCall(router.module, router.args[1:], router.kwargs, flat, order)
        moe_layer["router"] = call if call.works_alone(router.given, moe_layer["top_k"]) else None
        moe_layer["norm"] = _router_norm(calls[:index], router.given)
    return MoeLayer(**moe_layer)


def _output_order(output: Sequence[Any], routed: Tensor) -> tuple[int, int, int]:
    """Return the indices of logits, weights and experts in a router's output; weights have one entry per expert."""
    experts = next(i for i, t in enumerate(output) if isinstance(t, Tensor) and _same(t, routed))
    floats = [i for i, t in enumerate(output) if isinstance(t, Tensor) and t.is_floating_point()]
    weights = [i for i in floats if output[i].numel() == routed.numel()]
    weight = weights[0] if len(weights) == 1 else 1
    return next((i for i in floats if i != weight), weight), weight, experts


def _router_norm(calls: list[_Call], given: Tensor) -> nn.Module | None:
    """Find the module that turns the residual stream into a router's input; Identity if there is none."""
    producers = [c for c in calls if any(_same_storage(t, given) for t in c.outputs)]
    if not producers:
        return nn.Identity()
    return _producer(producers, given) or next((c.module for c in producers if _contains_norm(c, calls)), None)


def _contains_norm(call: _Call, calls: list[_Call]) -> bool:
    """Return whether a module normalizes its single input inside, and returns a tensor of the same shape."""
    tensors = [a for a in (*call.args, *call.kwargs.values(), call.output) if isinstance(a, Tensor)]
    if len(call.args) != 1 or len(tensors) != 2 or tensors[0].shape != tensors[1].shape:
        return False
    inner = [c for c in calls if c.path.startswith(f"{call.path}.") and c.given is call.given]
    return any(_is_norm(c) for c in inner)


def _ffn_norm(calls: list[_Call], layer_path: str, width: int) -> nn.Module | None:
    """Find the norm before a decoder layer's feed-forward: its last child that reads and returns hidden states.

    Norms and identities do not count. Later blocks of another width, as Gemma's per-layer inputs have, read something
    else than the residual stream. Returns the feed-forward itself if it reads the residual stream directly.
    """
    children = [c for c in calls if c.path.rpartition(".")[0] == layer_path]
    readers = [c for c in children if not _is_norm(c) and not _returns_input(c) and _has_width(c.given, width)]
    blocks = [c for c in readers if c.outputs and _has_width(c.outputs[0], width)] or readers
    if not blocks or (given := blocks[-1].given) is None:
        return None
    produced = any(_same_storage(output, given) for call in calls for output in call.outputs)
    if not produced and blocks[-1].args:  # a forward pre-hook only receives positional arguments
        return blocks[-1].module
    return _producer(children, given)


def _has_width(tensor: Tensor | None, width: int) -> bool:
    return tensor is not None and tensor.ndim >= 2 and tensor.shape[-1] == width


def _returns_input(call: _Call) -> bool:
    """Return whether a module returned its input, as dropout does in inference."""
    return bool(call.outputs) and call.given is not None and _same_storage(call.outputs[0], call.given)


def _producer(calls: list[_Call], tensor: Tensor) -> nn.Module | None:
    """Return the norm whose output is this tensor, or a tensor that shares its storage."""
    return next((c.module for c in calls if _is_norm(c) and _same_storage(c.outputs[0], tensor)), None)


def _is_norm(call: _Call) -> bool:
    """Return whether a module is a leaf with only 1-D weights, whose output is a new tensor of its input's shape."""
    if any(True for _ in call.module.children()) or len(call.outputs) != 1 or call.given is None:
        return False
    weights = list(call.module.parameters(recurse=False))
    changed = call.outputs[0].shape == call.given.shape and not _same_storage(call.outputs[0], call.given)
    return changed and all(w.ndim == 1 for w in weights)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same memory with the same shape."""
    same_kind = a.shape == b.shape and a.dtype == b.dtype and a.storage_offset() == b.storage_offset()
    return a is b or (same_kind and _same_storage(a, b))


def _same_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share a storage; compares storages, since data pointers are 0 on the meta device."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
