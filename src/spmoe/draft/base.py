"""The contract of a draft: propose tokens, and show what its layers produce on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from spmoe import types


class ChunkObserver(Protocol):
    """Who looks on: `ask` is what to compute about a chunk of layers, a call hands the chunk and the answer over."""

    def ask(self, depths: range, residual: Tensor) -> types.Routing | None:  # residual: [depths, rows, hidden]
        ...

    def __call__(self, seen: types.LayerChunk) -> None: ...


class Drafter(Protocol):
    """Proposes up to k tokens per sequence. It keeps its own state of every sequence until told to release it."""

    def propose(self, sequences: Sequence[types.Sequence], k: int, on_chunk: ChunkObserver | None) -> list[types.Draft]:
        """Catch up with the sequences' tokens and propose k more each; k = 0 only catches up with a new prompt."""
        ...

    def begin(self, sequence: types.Sequence, k: int, on_chunk: ChunkObserver | None) -> None:
        """k tokens of this sequence will be asked for next: let the device find them already, if it can by itself."""
        ...

    def prepare(self, k: int, on_chunk: ChunkObserver | None) -> None:
        """Greedy drafts of up to k tokens will be asked for: have recorded what can be."""
        ...

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Forget, per sequence id, every position from the given length on."""
        ...

    def release(self, sequence_id: int) -> None:
        """The sequence is over."""
        ...
