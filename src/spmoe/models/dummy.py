"""Models of random weights, made from a configuration alone: `--load-format dummy`.

Dense weights are drawn by transformers' own initialization, on the device that runs the model. Experts are drawn once
for a few of them and repeated, since drawing a hundred gigabytes takes minutes and copying them seconds. A model
without tokenizer files gets one whose tokens are bytes, and numbers beyond those.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from spmoe.formats.expert import ExpertFormat, Shapes
from spmoe.models.checkpoint import Checkpoint
from spmoe.registry import WEIGHT_FORMATS
from spmoe.types import ExpertKey

_SEED = 0
_EMBEDDING_DEVIATION = 10.0  # several times what all layers add; measured: greedy text of 60 tokens repeats none
_DISTINCT_VALUES = 2**27  # weights of all experts that are drawn; the others repeat them
_MIN_DISTINCT = 2  # also of large experts, so that no two neighbours are equal
BYTE_TOKENS = 256  # tokens of a byte tokenizer that stand for bytes


def random_model(cls: Any, config: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """Build a model with the random weights that its family starts training from, on a device.

    Norms are 1 and other weights have the standard deviation `initializer_range`, so activations stay finite at any
    depth. Embeddings are larger, unless they are also the output head: small ones vanish beside the attention's output,
    which random weights make almost equal for all tokens. Greedy text would then repeat one token, and its experts.
    """
    indices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(indices, device_type="cuda"), torch.no_grad():
        torch.manual_seed(_SEED)
        model = _on_device(cls, device).from_pretrained(None, state_dict={}, config=config, dtype=dtype, **options)
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or head.weight is not embeddings.weight:
            embeddings.weight.normal_(0.0, _EMBEDDING_DEVIATION)
    return model


def _on_device(cls: Any, device: torch.device) -> Any:
    """Return a subclass that initializes missing weights on a device; transformers' own would do it on the CPU."""

    def move(self: Any, missing_keys: Any, device_map: Any, *arguments: Any, **options: Any) -> None:
        cls._move_missing_keys_from_meta_to_device(self, missing_keys, {"": device}, *arguments, **options)

    members = {"_move_missing_keys_from_meta_to_device": move, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)


def declared_format(checkpoint: Checkpoint) -> str | None:
    """Return the weight format that config.json declares for experts; None: 16 or 32 bits, or one that is not known."""
    quantization = checkpoint.quantization
    if quantization is None or len(quantization.schemes) != 1:
        return None
    (scheme,) = quantization.schemes
    name = scheme.kind
    if name == "fp8":
        in_blocks = scheme.block is not None or quantization.method == "fp8"  # whose default are blocks
        name = "fp8-block128" if in_blocks else "fp8-channel"
    elif name == "int":
        group = "channel" if scheme.group is None else f"g{scheme.group}"
        name = f"int{scheme.bits}{'' if scheme.symmetric else '-asym'}-{group}"
    return name if name in WEIGHT_FORMATS else None


def distinct_experts(shapes: Sequence[Shapes], count: int) -> int:
    """Return how many of `count` experts are drawn; `shapes`: those of an expert of each layer."""
    largest = max(sum(math.prod(shape) for shape in layer.values()) for layer in shapes)
    return min(count, max(_MIN_DISTINCT, _DISTINCT_VALUES // largest))


class RandomExperts:
    """Writes blobs of random weights in any format: a few experts are drawn and converted, the others repeat them."""

    def __init__(self, shapes: Sequence[Shapes], counts: Sequence[int], format: ExpertFormat, deviation: float) -> None:
        # shapes: of an expert of each layer; counts: experts of each layer
        self._shapes = shapes
        self._format = format
        self._deviation = deviation
        self._distinct = distinct_experts(shapes, sum(counts))
        self._first = [0, *accumulate(counts)]
        self._drawn: dict[tuple[int, tuple[Any, ...]], Mapping[str, Tensor]] = {}
        self._locks = [threading.Lock() for _ in range(self._distinct)]

    def fill(self, key: ExpertKey, views: Mapping[str, Tensor]) -> None:
        """Write an expert into the views of its blob; callable from several threads."""
        shapes = self._shapes[key.layer]
        fields = self._format.views(views, shapes)
        number = (self._first[key.layer] + key.expert) % self._distinct
        name = number, tuple(shapes.items())
        with self._locks[number]:
            if name not in self._drawn:
                self._drawn[name] = self._draw(number, shapes)
        for field, drawn in self._drawn[name].items():
            fields[field].copy_(drawn)

    def _draw(self, number: int, shapes: Shapes) -> Mapping[str, Tensor]:
        """Return the fields of one expert's blob."""
        rng = torch.Generator().manual_seed(_SEED + 1 + number)
        dense = {
            name: torch.empty(shape, dtype=self._format.dtype).normal_(0.0, self._deviation, generator=rng)
            for name, shape in shapes.items()
        }
        layout = self._format.layout(shapes)
        views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
        self._format.convert(dense, views)
        return views


def byte_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast | None:
    """Return a tokenizer of a token per byte, whose further tokens are read as numbers; None if bytes do not fit."""
    if vocabulary < BYTE_TOKENS:
        return None
    symbols = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"<{token}>" for token in range(BYTE_TOKENS, vocabulary)),
    ]
    core = Tokenizer(models.BPE(vocab={symbol: token for token, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)
