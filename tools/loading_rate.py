"""Compare loading experts into host memory with plain reads of the same bytes.

    python tools/loading_rate.py MODEL [--dtype bfloat16] [--repeat 3]

MODEL is a checkpoint directory. Each row is a way to read all its experts; `cold` is the first read after the files
were dropped from the page cache, as far as the system allows that, `warm` the best of the reads after it. The last
column is the processor time of a warm read, of all threads together: on a busy machine it says more than the rate.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spmoe.config import EngineConfig
from spmoe.experts.memory_store import MemoryStore
from spmoe.files import read_into
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.loaded import LoadedModels, load_target

_CHUNK = 16 * 2**20  # bytes of one plain read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    checkpoint = Checkpoint.find(options.model)
    config = EngineConfig.make(model=options.model, dtype=options.dtype, device="cpu")
    models = load_target(config, checkpoint, torch.device("cpu"))
    files = sorted({*checkpoint.files.values()})
    ways: dict[str, tuple[int, Callable[[], None]]] = {
        "plain sequential read, one thread": (_size(files), lambda: _read_plainly(files)),
        "experts, converted, several threads": (models.spec.nbytes, lambda: _load(models, in_place=False)),
    }
    shards = models.open_shards()
    if shards is not None:
        shards.close()
        ways["experts, in place, several threads"] = (models.spec.nbytes, lambda: _load(models, in_place=True))
    print(f"{models.spec.count} experts, {models.spec.nbytes / 1e9:.2f} GB in {len(files)} files")
    print(f"{'':<40}{'cold GB/s':>10}{'warm GB/s':>10}{'CPU s/GB':>10}")
    for name, (nbytes, work) in ways.items():
        for file in files:
            _drop_from_cache(file)
        times = [_time(work) for _ in range(1 + options.repeat)]
        cold, warm, used = times[0][0], min(one[0] for one in times[1:]), min(one[1] for one in times[1:])
        rates = f"{nbytes / cold / 1e9:>10.2f}{nbytes / warm / 1e9:>10.2f}{used * 1e9 / nbytes:>10.3f}"
        print(f"{name:<40}{rates}", flush=True)


def _time(work: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds that work takes, and the processor seconds that it uses."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _read_plainly(files: list[Path]) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    for file in files:
        fd, offset = os.open(file, os.O_RDONLY), 0
        try:
            while count := read_into(fd, buffer, offset):
                offset += count
        finally:
            os.close(fd)


def _load(models: LoadedModels, *, in_place: bool) -> None:
    store = MemoryStore(models.spec)
    shards = models.open_shards() if in_place else None
    if shards is not None:
        store.load(shards, lambda done, total: None)
        shards.close()
    else:
        with models.experts() as fill:
            store.fill(fill, lambda done, total: None)
    store.close()


if __name__ == "__main__":
    main()
