"""The store in host memory: blobs of all experts in one allocation, filled by several threads."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from queue import SimpleQueue

import torch
from torch import Tensor

from spmoe.config import format_bytes
from spmoe.errors import StoreError
from spmoe.experts.store import FillBlob, StoreSpec
from spmoe.experts.transfer import BlobReader
from spmoe.system.host import available_memory, processor
from spmoe.types import ExpertKey

_MAX_FILLERS = 16  # threads; more only wait for each other's memory
_MIN_FILLERS = 4  # also with fewer cores: a thread that waits for the disk needs none
_SCRATCH_BYTES = 4 * 2**30  # host memory that all threads together may use beside the blobs
_PAGE_BYTES = 4096
_SCRATCH_EXPERTS = 3  # of one thread: source tensors, joined tensors and converted ones


class MemoryStore:
    """Blobs of all experts in one contiguous allocation of host memory."""

    path = "host memory"  # for messages, as that of an expert file

    def __init__(self, spec: StoreSpec) -> None:
        if (free := available_memory()) < spec.nbytes:
            raise StoreError(
                f"the experts need {format_bytes(spec.nbytes)} of host memory, but only {format_bytes(free)} are free; "
                f"{self._remedy}"
            )
        self.spec = spec
        pages = mmap.mmap(-1, spec.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults and TLB misses
        self._arena = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
        self._address = self._arena.data_ptr()
        self._first = [0, *accumulate(spec.experts)]

    _remedy = "free some memory, or use a smaller model"

    def blob(self, key: ExpertKey) -> Tensor:
        """Return an expert's blob."""  # [nbytes] uint8
        start = self._ordinal(key) * self.spec.layout.nbytes
        return self._arena[start : start + self.spec.layout.nbytes]

    def address(self, key: ExpertKey) -> int:
        """Return the host address of an expert's blob."""
        return self._address + self._ordinal(key) * self.spec.layout.nbytes

    def fill(self, fill: FillBlob, on_progress: Callable[[int, int], None], expert_bytes: int | None = None) -> None:
        """Fill the blobs of all experts with several threads; `on_progress` receives the experts done and their total.

        `fill` is called from all of them, `on_progress` from the calling thread. The first error ends the work, after
        the blobs under way, and is raised. `expert_bytes`: of the tensors that `fill` makes an expert from, which
        bound the number of threads; default: those of a blob.
        """
        threads = _filler_count(self.spec.layout.nbytes if expert_bytes is None else expert_bytes)

        def write(key: ExpertKey) -> None:
            blob = self.blob(key)
            # touch the pages here: a copy from a device would do it too, but keeps all other threads from theirs
            blob[::_PAGE_BYTES].zero_()
            fill(key, self.spec.layout.views(blob))
            self._filled(key)

        with _one_intra_op_thread():
            _for_each(list(self.spec.keys()), write, threads, on_progress)

    def load(self, reader: BlobReader, on_progress: Callable[[int, int], None]) -> None:
        """Read the blobs of all experts straight to their places, as `fill` does."""

        def write(key: ExpertKey) -> None:
            reader.read(key, memoryview(self.blob(key).numpy()))  # type: ignore[arg-type]
            self._filled(key)

        with _one_intra_op_thread():
            _for_each(list(self.spec.keys()), write, _filler_count(0), on_progress)

    def read(self, key: ExpertKey, buffer: memoryview) -> None:
        """Copy an expert's blob into a buffer."""
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(self.blob(key))

    def close(self) -> None:
        """Free the memory; idempotent. No copy may be in flight."""
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _filled(self, key: ExpertKey) -> None:
        """Note that an expert's blob is complete; called once for each, from any thread."""

    def _ordinal(self, key: ExpertKey) -> int:
        return self._first[key.layer] + key.expert


def _filler_count(expert_bytes: int) -> int:
    """Return how many threads fill blobs, each with scratch memory for experts of this size."""
    cores = min(_MAX_FILLERS, max(_MIN_FILLERS, processor().usable_cores))
    return max(1, min(cores, _SCRATCH_BYTES // max(1, _SCRATCH_EXPERTS * expert_bytes)))


@contextmanager
def _one_intra_op_thread() -> Iterator[None]:
    """Let operations of the threads that are started inside use one thread each: the blobs are the parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _for_each(
    keys: list[ExpertKey], work: Callable[[ExpertKey], None], threads: int, on_progress: Callable[[int, int], None]
) -> None:
    """Call `work` for every key, in order, on several threads; raise the first error when all of them have ended."""
    ended: SimpleQueue[BaseException | None] = SimpleQueue()  # one entry for each call, and for each thread
    remaining, lock, stop = iter(keys), threading.Lock(), threading.Event()

    def run() -> None:
        try:
            while not stop.is_set():
                with lock:
                    key = next(remaining, None)
                if key is None:
                    return
                work(key)
                ended.put(None)
        except BaseException as error:
            stop.set()
            ended.put(error)

    pool = [threading.Thread(target=run, name="spmoe-experts", daemon=True) for _ in range(min(threads, len(keys)))]
    on_progress(0, len(keys))
    try:
        for thread in pool:
            thread.start()
        for done in range(1, len(keys) + 1):
            if (error := ended.get()) is not None:
                raise error
            on_progress(done, len(keys))
    finally:  # also after an interrupt: nothing is written when this returns
        stop.set()
        for thread in pool:
            if thread.ident is not None:
                thread.join()
