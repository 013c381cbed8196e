"""Number of PyTorch threads for the included pair and for other models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from spmoe.engine.llm import threads_for
from spmoe.models.shipped import shipped_pair


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model", [None, shipped_pair()[0]])
def test_included_pair_runs_on_one_thread(model: str | None) -> None:
    with suppress(ValueError), threads_for(model):
        assert torch.get_num_threads() == 1
        raise ValueError("the number is restored after an error")
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("model", "shape"), [("some/other", None), (None, "mixtral-8x7b")])
def test_other_models_keep_the_number_of_threads(model: str | None, shape: str | None) -> None:
    with threads_for(model, shape):
        assert torch.get_num_threads() == 3


def test_omp_num_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with threads_for(None):
        assert torch.get_num_threads() == 3
