"""Garbage collection is paused until the last pause ends; a waiting loop lets other threads run; sleeps are short."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading

import pytest

from spmoe.engine.engine_thread import EngineThread
from spmoe.interpreter import gc_paused, let_others_run


def test_pauses_nest() -> None:
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), gc_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pause_outlasts_that_of_another_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with gc_paused():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(10)
    with gc_paused():
        leave.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_imports_of_the_engine_are_left_out_of_garbage_collection() -> None:
    """With a module in the engine's place, that notes whether collection is enabled while it is imported."""
    script = """
import gc, sys
from importlib.machinery import ModuleSpec

class Engine:
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self) if name == "spmoe.engine.llm" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.objects, module.collecting = [{} for _ in range(1000)], gc.isenabled()

sys.meta_path.insert(0, Engine())
from spmoe.cli.interrupts import import_engine
import_engine()
frozen = gc.get_freeze_count()
print(sys.modules["spmoe.engine.llm"].collecting, frozen >= 1000, gc.isenabled())
kept = [[] for _ in range(1000)]
import_engine()
print(gc.get_freeze_count() <= frozen)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True", "True", "True"], done.stderr


def test_a_loop_lets_other_threads_run() -> None:
    interval, done = sys.getswitchinterval(), threading.Event()
    sys.setswitchinterval(1000)  # seconds: a thread has the interpreter until it lets others have it
    try:
        thread = threading.Thread(target=done.set)
        thread.start()
        rounds = 0
        while not done.is_set() and rounds < 10**7:
            let_others_run()
            rounds += 1
        assert done.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_the_engine_thread_is_woken_in_time() -> None:
    def timer_slack() -> int:
        return int(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK, ns

    before, engine = timer_slack(), EngineThread("test")
    try:
        assert engine.call(timer_slack) == 1000 < before
    finally:
        engine.close()
    assert timer_slack() == before
