"""Programs: forwards of a few rows, recorded once per row count and replayed with new tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.graphs import Recorder, Recording
from spmoe.backends.kernels.inputs import stage
from spmoe.models.attention import device_length
from spmoe.models.kv import KvState
from spmoe.models.taps import Taps, Watch
from spmoe.types import Routing


@dataclass
class Slab:
    """What a watch asked about a slab of layers, and where the answer arrives."""

    depths: range
    residual: Tensor  # [depths, rows, hidden], on the device
    asked: Routing | None  # on the device
    answer: Routing | None  # page-locked
    arrived: Any  # an event


class Program:
    """One recorded forward over one attention state."""

    def __init__(
        self,
        model: Any,
        taps: Taps,
        depth_count: int,
        kv: KvState,
        recorder: Recorder,
        rows: int,
        keep: int,
        watch: Watch | None,
    ) -> None:
        device = model.device
        self._inbox = torch.zeros(rows + 1, dtype=torch.int64, pin_memory=True)  # tokens, and how many came before
        self._inbox[rows] = kv.length
        self._recorder = recorder
        self._slabs: list[Slab] = []
        self._answers: list[Routing | None] = []
        ids = torch.zeros(1, rows, dtype=torch.int64, device=device)
        positions, length = torch.zeros_like(ids), ids.new_zeros(1)
        on_tap = watch.tap(depth_count, self._on_slab(watch.ask)) if watch is not None else None

        def forward() -> Tensor:
            self._slabs.clear()
            stage(self._inbox, ids, positions, length)
            with torch.inference_mode(), device_length(length), taps.listen(on_tap):
                output = model(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=kv.cache,
                    use_cache=True,
                    logits_to_keep=keep,
                )
            return output.logits[0]  # type: ignore[no-any-return]

        self._recording: Recording
        self._recording, self._logits = recorder.record(forward)

    def run(self, tokens: list[int], length: int, watch: Watch | None) -> Tensor:
        """Logits of the rows kept; they are overwritten by the next run."""  # [keep, vocabulary]
        self._inbox.copy_(torch.tensor([*tokens, length]))
        self._recording.replay()
        for slab in self._slabs:
            slab.arrived.synchronize()
            if watch is not None:
                watch.tell(slab.depths, slab.residual, slab.answer)
        return self._logits

    def _on_slab(self, ask: Callable[[range, Tensor], Routing | None]) -> Callable[[range, Tensor], None]:
        def on_slab(depths: range, residual: Tensor) -> None:
            asked = ask(depths, residual)
            number = len(self._slabs)
            if number == len(self._answers):  # page-locked memory cannot be had while recording
                self._answers.append(None if asked is None else Routing(*(_page_locked(t) for t in asked)))
            answer = self._answers[number]
            if asked is not None and answer is not None:
                for there, here in zip(asked, answer, strict=True):
                    here.copy_(there, non_blocking=True)
            slab = Slab(depths, residual, asked, answer, self._recorder.new_event())
            self._slabs.append(slab)
            self._recorder.split(slab.arrived.record)

        return on_slab


def _page_locked(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
