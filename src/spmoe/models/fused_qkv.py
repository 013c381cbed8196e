"""Linear layers that their module feeds with one tensor: whichever is called first computes all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from weakref import ref

from torch import Tensor, nn

# what attention makes of its input in transformers' families: queries, keys, values, latent ones, gates
_NAMES = ("q_proj", "q_a_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "gate_proj", "g_proj")
_PATIENCE = 2  # inputs in a row that some of the layers were not called with, until each computes only its own


def parallel_linears(module: nn.Module) -> list[nn.Linear]:
    """Those of a module's layers that may be fed alike; whether they are shows when they run."""
    children = dict(module.named_children())
    if "q_proj" not in children and "q_a_proj" not in children:
        return []
    named = [children[name] for name in _NAMES if name in children]
    found = [child for child in named if type(child) is nn.Linear and "forward" not in vars(child)]
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device) for layer in found}
    return found if len(found) > 1 and len(kinds) == 1 else []


class FusedProjections:
    """Such layers, for few rows. Alone or with the others, each one's result is the same in every bit.

    What was computed ahead is handed out once, for the very tensor that it was computed from, unless that has been
    written to since, and is gone when the tensor is. Inference tensors do not tell that they were written to: a module
    that does so between these layers gives another result than it did, which is found out where models are fused.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        from spmoe.backends.kernels.dense import fused_linears, select_fused_tile, small_batch_linear

        self._layers, self._one, self._all = layers, small_batch_linear, fused_linears
        weight, counts = layers[0].weight, [layer.out_features for layer in layers]
        self._tile = select_fused_tile(1, counts, weight.shape[1], weight.dtype)
        self._ahead: _Ahead | None = None
        self._unasked = 0  # times in a row that something of it was not asked for

    def form(self, number: int) -> Callable[[Tensor], Tensor]:
        """The forward of one of the layers."""

        def form(x: Tensor) -> Tensor:  # [.., k] -> [.., n]
            found = self._take(number, x)
            if found is not None:
                return found
            if self._unasked >= _PATIENCE or not self._all_fit(x):
                return self.alone(number, x)
            results = dict(enumerate(self.merge_prefetches(x)))
            found = results.pop(number)
            self._ahead = _Ahead(x, {i: (y, self._layers[i].weight, self._layers[i].bias) for i, y in results.items()})
            return found

        return form

    def merge_prefetches(self, x: Tensor) -> list[Tensor]:
        """All of their results, by one kernel."""
        weights, biases = ([getattr(layer, name) for layer in self._layers] for name in ("weight", "bias"))
        results = self._all(x.reshape(-1, x.shape[-1]), weights, biases, tile=self._tile)
        return [y.view(*x.shape[:-1], -1) for y in results]

    def alone(self, number: int, x: Tensor) -> Tensor:
        """One of them, by its own."""
        layer = self._layers[number]
        y = self._one(x.reshape(-1, x.shape[-1]), layer.weight, layer.bias, tile=self._tile)
        return y.view(*x.shape[:-1], -1)

    def _take(self, number: int, x: Tensor) -> Tensor | None:
        """What was computed ahead; if it is not there, nothing of it is kept."""
        ahead, layer = self._ahead, self._layers[number]
        if ahead is None:
            return None
        found = ahead.take(number, x, layer.weight, layer.bias)
        if found is None:
            self._ahead, self._unasked = None, self._unasked + 1
        elif not ahead.results:
            self._ahead, self._unasked = None, 0
        return found

    def _all_fit(self, x: Tensor) -> bool:
        """Whether what the layers have now, which may have been exchanged, goes into one kernel."""
        given = [t for layer in self._layers for t in (layer.weight, layer.bias) if t is not None]
        alike = all(t.dtype == x.dtype and t.device == x.device for t in given)
        return alike and all(layer.weight.shape[-1] == x.shape[-1] for layer in self._layers)


class _Ahead:
    """Results of one input, with the weight and bias that each was made with."""

    def __init__(self, x: Tensor, results: dict[int, tuple[Tensor, Tensor, Tensor | None]]) -> None:
        self.results = results
        self._x = ref(x, lambda _: results.clear())
        self._version = _version(x)
        self._thread = get_ident()  # another may be on another stream

    def take(self, number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if self._x() is not x or self._version != _version(x) or self._thread != get_ident():
            return None
        y, *made_with = self.results.pop(number, (None, None, None))
        return y if made_with[0] is weight and made_with[1] is bias else None


def _version(x: Tensor) -> int:
    """How often a tensor has been written to, as far as that is counted."""
    return -1 if x.is_inference() else x._version
