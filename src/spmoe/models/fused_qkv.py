"""Fused attention projections (q, k, v, ...): the first one called with an input computes all of them in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from weakref import ref

from torch import Tensor, nn

# projections of an attention module's input in transformers' families: queries, keys, values, latents, gates
_NAMES = ("q_proj", "q_a_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "gate_proj", "g_proj")
_MAX_MISSES = 2  # consecutive inputs that not all projections were called with, until fusing stops


def parallel_linears(module: nn.Module) -> list[nn.Linear]:
    """Return a module's linear layers that may share their input; whether they do only shows when they run."""
    children = dict(module.named_children())
    if "q_proj" not in children and "q_a_proj" not in children:
        return []
    named = [children[name] for name in _NAMES if name in children]
    found = [child for child in named if type(child) is nn.Linear and "forward" not in vars(child)]
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device) for layer in found}
    return found if len(found) > 1 and len(kinds) == 1 else []


class FusedProjections:
    """Linear layers with a common input, for few rows. Each result has the same bits, fused or not.

    A result computed ahead is returned once, for the very tensor it was computed from, and is freed with that tensor.
    A write to the tensor invalidates it. Inference tensors do not count writes: a module that writes to its input
    between the projections would get another result, which the check of the fused model against the original detects.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        from spmoe.backends.kernels.dense import fused_linears, select_fused_tile, small_batch_linear

        self._layers, self._linear_kernel, self._fused_kernel = layers, small_batch_linear, fused_linears
        weight, counts = layers[0].weight, [layer.out_features for layer in layers]
        self._tile = select_fused_tile(1, counts, weight.shape[1], weight.dtype)
        self._pending: _PendingResults | None = None
        self._misses = 0  # consecutive inputs of which a result was never used

    def forward_of(self, number: int) -> Callable[[Tensor], Tensor]:
        """Return the forward for one of the layers."""

        def forward(x: Tensor) -> Tensor:  # [.., k] -> [.., n]
            found = self._take(number, x)
            if found is not None:
                return found
            if self._misses >= _MAX_MISSES or not self._can_fuse(x):
                return self.single(number, x)
            results = dict(enumerate(self.all_results(x)))
            found = results.pop(number)
            self._pending = _PendingResults(
                x, {i: (y, self._layers[i].weight, self._layers[i].bias) for i, y in results.items()}
            )
            return found

        return forward

    def all_results(self, x: Tensor) -> list[Tensor]:
        """Compute every layer with one kernel."""
        weights, biases = ([getattr(layer, name) for layer in self._layers] for name in ("weight", "bias"))
        results = self._fused_kernel(x.reshape(-1, x.shape[-1]), weights, biases, tile=self._tile)
        return [y.view(*x.shape[:-1], -1) for y in results]

    def single(self, number: int, x: Tensor) -> Tensor:
        """Compute one layer alone, with the tile sizes of the fused kernel so that the bits are equal."""
        layer = self._layers[number]
        y = self._linear_kernel(x.reshape(-1, x.shape[-1]), layer.weight, layer.bias, tile=self._tile)
        return y.view(*x.shape[:-1], -1)

    def _take(self, number: int, x: Tensor) -> Tensor | None:
        """Return the result computed ahead for x; if there is none, drop all pending results."""
        pending, layer = self._pending, self._layers[number]
        if pending is None:
            return None
        found = pending.take(number, x, layer.weight, layer.bias)
        if found is None:
            self._pending, self._misses = None, self._misses + 1
        elif not pending.results:
            self._pending, self._misses = None, 0
        return found

    def _can_fuse(self, x: Tensor) -> bool:
        """Return whether the layers' present weights, which may have been replaced, still fit into one kernel."""
        tensors = [t for layer in self._layers for t in (layer.weight, layer.bias) if t is not None]
        same_kind = all(t.dtype == x.dtype and t.device == x.device for t in tensors)
        return same_kind and all(layer.weight.shape[-1] == x.shape[-1] for layer in self._layers)


class _PendingResults:
    """Results computed ahead for one input, each with the weight and bias it was computed with."""

    def __init__(self, x: Tensor, results: dict[int, tuple[Tensor, Tensor, Tensor | None]]) -> None:
        self.results = results
        self._x = ref(x, lambda _: results.clear())
        self._version = _version(x)
        self._thread = get_ident()  # another thread may use another CUDA stream

    def take(self, number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Remove and return a layer's result; None for another input, thread, weight or bias."""
        if self._x() is not x or self._version != _version(x) or self._thread != get_ident():
            return None
        y, *computed_with = self.results.pop(number, (None, None, None))
        return y if computed_with[0] is weight and computed_with[1] is bias else None


def _version(x: Tensor) -> int:
    """Return a tensor's write counter; -1 for inference tensors, which have none."""
    return -1 if x.is_inference() else x._version
