"""No draft: plain decoding, through the same loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmoe import types
from spmoe.draft.base import ChunkObserver


class NoDraft:
    """Proposes nothing."""

    def propose(self, sequences: Sequence[types.Sequence], k: int, on_chunk: ChunkObserver | None) -> list[types.Draft]:
        return [types.Draft([]) for _ in sequences]

    def begin(self, sequence: types.Sequence, k: int, on_chunk: ChunkObserver | None) -> None:
        pass

    def prepare(self, k: int, on_chunk: ChunkObserver | None) -> None:
        pass

    def rewind(self, lengths: Mapping[int, int]) -> None:
        pass

    def release(self, sequence_id: int) -> None:
        pass
