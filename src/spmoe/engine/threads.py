"""PyTorch's threads, where a model is so small that they mostly wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from spmoe.models.shipped import shipped_pair


def threads_for(model: str | None, shape: str | None = None) -> AbstractContextManager[None]:
    """One thread for the pair that ships, unless it is widened or OMP_NUM_THREADS says how many there are to be.

    They are the process's, so this is for whoever owns that: the command line does.
    """
    small = model in (None, shipped_pair()[0]) and shape is None
    return one_thread() if small and "OMP_NUM_THREADS" not in os.environ else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Small products are fastest on one thread, and several of them wait for each other where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
