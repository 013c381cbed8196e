"""The engine's thread: calls, jobs in turns, cancellation, errors, forks, and an end within a time limit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from spmoe.engine import engine_thread
from spmoe.engine.engine_thread import EngineThread
from spmoe.errors import SpmoeError

LIMIT = 20


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    made = EngineThread()
    yield made
    made.close()


def test_calls_run_on_the_thread(thread: EngineThread) -> None:
    names = [thread.call(lambda: threading.current_thread().name) for _ in range(2)]
    assert names == ["spmoe-engine"] * 2
    assert thread.call(lambda: thread.call(lambda: 5)) == 5, "a call from the thread itself runs at once"


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), MemoryError()])
def test_errors_are_raised_where_the_result_is_awaited(thread: EngineThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    def work() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(type(error)):
        thread.call(fail)
    job = thread.job(work)
    assert next(job) == 1
    with pytest.raises(type(error)):
        next(job)
    assert list(job) == []
    assert thread.call(lambda: "alive") == "alive"


def test_jobs_run_in_turns(thread: EngineThread) -> None:
    order: list[str] = []
    begin = threading.Event()

    def work(name: str) -> Iterator[str]:
        for _ in range(3):
            order.append(name)
            yield name

    blocked = threading.Thread(target=lambda: thread.call(lambda: begin.wait(LIMIT)))
    blocked.start()
    jobs = [thread.job(lambda name=name: work(name)) for name in "ab"]  # type: ignore[misc]
    begin.set()
    assert [list(job) for job in jobs] == [["a"] * 3, ["b"] * 3]
    blocked.join()
    assert sorted(order[:2]) == ["a", "b"]


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_cancelled_job_ends_after_its_step_and_cleans_up(thread: EngineThread, how: str) -> None:
    cleaned = threading.Event()
    steps: list[int] = []

    def work() -> Iterator[int]:
        try:
            while True:
                steps.append(len(steps))
                time.sleep(0.001)
                yield steps[-1]
        finally:
            cleaned.set()

    job = thread.job(work)
    assert next(job) == 0
    if how == "cancel":
        job.cancel()
    else:
        del job
        gc.collect()
    assert cleaned.wait(LIMIT)
    count = len(steps)
    thread.call(lambda: None)
    assert len(steps) == count


def test_error_while_a_job_cleans_up_does_not_end_the_thread(thread: EngineThread) -> None:
    def work() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise ValueError("clean-up failed")

    job = thread.job(work)
    next(job)
    job.cancel()
    with pytest.raises(ValueError, match="clean-up failed"):
        list(job)
    assert thread.call(lambda: 1) == 1


def test_interrupt_ends_the_wait_and_not_the_thread(thread: EngineThread) -> None:
    release = threading.Event()
    for _ in range(5):
        release.clear()
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            thread.call(lambda: release.wait(LIMIT))
        timer.join()
        release.set()
        assert thread.call(lambda: 7) == 7


def test_close_ends_jobs_then_runs_the_last_call() -> None:
    before = set(threading.enumerate())
    thread, order = EngineThread(), list[str]()

    def work() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            order.append("job")

    job = thread.job(work)
    next(job)
    thread.close(lambda: order.append("last"))
    assert order == ["job", "last"]
    with pytest.raises(SpmoeError, match="closed"):
        list(job)
    with pytest.raises(SpmoeError, match="closed"):
        thread.call(lambda: None)
    with pytest.raises(SpmoeError, match="closed"):
        thread.job(work)
    thread.close()
    assert not set(threading.enumerate()) - before


def test_error_of_the_last_call_is_raised_by_close() -> None:
    def fail() -> None:
        raise ValueError("cannot close")

    with pytest.raises(ValueError, match="cannot close"):
        EngineThread().close(fail)


def test_close_says_that_the_thread_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "JOIN_SECONDS", 0.05)
    monkeypatch.setattr(engine_thread, "_POLL_SECONDS", 0.01)
    thread, release = EngineThread(), threading.Event()
    blocked = threading.Thread(target=lambda: thread.call(lambda: release.wait(LIMIT)))
    blocked.start()
    time.sleep(0.05)
    with pytest.raises(SpmoeError, match=r"has not ended for 0\.05 s"):
        thread.close()
    release.set()
    blocked.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_is_refused(thread: EngineThread) -> None:
    def use(answers: multiprocessing.SimpleQueue[str]) -> None:
        try:
            thread.call(lambda: None)
        except SpmoeError as error:
            answers.put(str(error))
        thread.close()

    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=use, args=(answers,))
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
    assert "spawn" in answers.get()
    assert thread.call(lambda: 3) == 3, "the parent's engine runs on"
