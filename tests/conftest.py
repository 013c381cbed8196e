"""Checkpoints for all tests, and an environment without the network and the user's cache."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spmoe.interpreter import gc_paused

# one thread per worker is fastest, in this process and in those that tests start; numpy reads it when it is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # the hub client reads it once, when it is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background; tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)
with torch.device("cpu"):  # torch caches the functions that such a context applies to: before a test patches one
    torch.empty(0)

HANG_SECONDS = 300.0

if TYPE_CHECKING:
    from checkpoints import Pair


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n, run a file on one worker, so that its fixtures are made once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # keep the order below
    return LoadFileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Pause garbage collection while test modules are imported, and leave out what they import in later collections."""
    with gc_paused():
        result = yield
    gc.freeze()
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run every N-th of the selected tests, from the I-th on (I from 0)")


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker is left with one when the others have finished."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if (shard := config.getoption("--shard")) is not None:
        first, step = map(int, shard.split("/"))
        items[:] = items[first::step]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let a test that hangs fail. Tests on a GPU may take longer."""

    def fail(number: int, frame: object) -> None:
        raise TimeoutError(f"the test has not ended after {HANG_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 0 if item.get_closest_marker("gpu") else HANG_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", autouse=True)
def spmoe_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory of this test run's expert files and profiles."""
    home = tmp_path_factory.mktemp("spmoe-home")
    before = os.environ.get("SPMOE_HOME")
    os.environ["SPMOE_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["SPMOE_HOME"]
    else:
        os.environ["SPMOE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def _no_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def _no_timed_passes() -> Iterator[None]:
    """Time no passes when engines are built: notices must not depend on how busy the machine is."""
    from spmoe.engine import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "compute_times", lambda *engine: None)
        yield


@pytest.fixture
def fixed_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix Triton's interpreter.

    It multiplies the bits of bfloat16 as integers and truncates to bfloat16 where hardware rounds. Its loop bounds fail
    with numpy 2.4.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    patch, cast = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.cast_impl

    def wide(handle: Any) -> Any:
        bits = handle.dtype.scalar == tl.bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32) if bits else handle.data

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right, total = wide(a), wide(b), d.data
        for k in range(0, left.shape[1], 16):  # the inputs that a tensor core adds before it rounds
            product = np.matmul(left[:, k : k + 16], right[k : k + 16], dtype=np.float64)
            total = (product + total).astype(np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def rounded(self: Any, given: Any, to: Any) -> Any:
        if (given.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, given, to)
        bits = torch.tensor(given.data).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, to.scalar)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(scope="session")
def mixtral_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Mixtral target with Mistral drafts."""
    from checkpoints import save_pair

    return save_pair(tmp_path_factory.mktemp("mixtral"), "mixtral", seed=40)


@pytest.fixture(scope="session")
def qwen_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Qwen3-MoE target with Qwen3 drafts."""
    from checkpoints import save_pair

    return save_pair(tmp_path_factory.mktemp("qwen3-moe"), "qwen3_moe", seed=50)


@pytest.fixture(scope="session", params=["mixtral", "qwen3_moe"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """The pairs of both families, one after the other."""
    found: Pair = request.getfixturevalue({"mixtral": "mixtral_pair", "qwen3_moe": "qwen_pair"}[request.param])
    return found


@pytest.fixture(scope="session")
def llama_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, unrelated to any target, with the same tokenizer."""
    from checkpoints import byte_tokenizer, llama, save, seeded

    return save(seeded(llama, 7), tmp_path_factory.mktemp("llama"), byte_tokenizer())


@pytest.fixture(scope="session")
def windowed_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Mixtral and drafts with a sliding window that is shorter than the text that tests generate."""
    from checkpoints import mistral, mixtral, save_pair, seeded

    window = {"sliding_window": 8}
    return save_pair(
        tmp_path_factory.mktemp("windowed"),
        "mixtral",
        target=seeded(mixtral, 11, **window),
        draft=seeded(mistral, 10, **window),
    )


@pytest.fixture(scope="session")
def partly_dense_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Qwen3-MoE of four layers, two of which are dense."""
    from checkpoints import qwen3, qwen3_moe, save_pair, seeded

    return save_pair(
        tmp_path_factory.mktemp("partly-dense"),
        "qwen3_moe",
        target=seeded(qwen3_moe, 31, num_hidden_layers=4, mlp_only_layers=[0, 2]),
        draft=seeded(qwen3, 30, num_hidden_layers=4),
    )


@pytest.fixture(scope="session")
def recurrent_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with linear attention, whose state cannot be rolled back."""
    from checkpoints import byte_tokenizer, qwen3_next, save, seeded

    return save(seeded(qwen3_next, 41), tmp_path_factory.mktemp("recurrent"), byte_tokenizer())
