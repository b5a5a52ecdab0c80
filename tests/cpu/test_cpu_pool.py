"""The threads of the engine: for two callers at once, after a fork, asleep, ended, too many, woken often."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kit import raw_bytes

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu import pool as pool_module
from hipfire.kernels.cpu.engine import CpuEngine, Program
from hipfire.kernels.cpu.pool import MOST_SECTIONS, ROW_LENGTH, Pool, publish
from hipfire.kernels.cpu.rows import add

SECONDS = 60.0
# what a forked child does takes milliseconds
CHILD_SECONDS = 20.0


class Counter:
    """A program that adds one to every number of `total`, by way of `between`: a barrier before each row."""

    def __init__(self, engine: CpuEngine, rows: int = 5) -> None:
        self.total, self.between, self.one = (torch.zeros(rows, 70) for _ in range(3))
        self.one.fill_(0.5)
        self.runs = 0
        scratch, each = engine.scratch(64)
        engine.record()
        for source, target in ((self.total, self.between), (self.between, self.total)):
            strides = (4 * 70, 4 * 70)
            arguments = (source, self.one, rows, 70, *strides, target, scratch, each)
            engine.launch(add, *arguments, reads=(source, self.one), writes=(target,))
        program = engine.finish()
        assert program is not None
        self.program: Program = program
        self.total.zero_()

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.program.run()
        self.runs += times

    def right(self) -> bool:
        return bool((self.total == float(self.runs)).all())


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("hipfire-")}


def in_child(work: Callable[[], bool]) -> int:
    """Run `work` in a forked child; returns its exit status, or the signal that ended it after a time."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    limit = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def flag(control: int, offset: int, thread: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(control + offset + pool_module._LINE * thread)


def at_once(*tasks: Callable[[], None]) -> None:
    """Run tasks on Python threads that start together; fails if one does not end."""
    gate = threading.Barrier(len(tasks))

    def start(task: Callable[[], None]) -> None:
        gate.wait()
        task()

    threads = [threading.Thread(target=start, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a program did not end"


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_many_tiny_programs_lose_nothing(threads: int) -> None:
    counter = Counter(CpuEngine(threads))
    assert counter.program.barriers == 1
    counter.run(3000 if threads < 9 else 100)
    assert counter.right()


def test_two_python_threads_share_one_engine_and_use_two() -> None:
    shared, other = CpuEngine(2), CpuEngine(3)
    counters = [Counter(shared), Counter(shared), Counter(other)]
    at_once(*(lambda counter=counter: counter.run(500) for counter in counters))  # type: ignore[misc]
    assert all(counter.right() for counter in counters)


def test_threads_that_fall_asleep_between_programs_are_woken() -> None:
    counter = Counter(CpuEngine(3))
    rng = np.random.default_rng(1)
    # workers spin for some hundred microseconds: pauses around that meet every moment of falling asleep
    for pause in rng.uniform(0.0, 2e-3, 400):
        counter.run()
        time.sleep(pause)
    assert counter.right()


def test_every_sleeper_of_a_large_machine_is_named() -> None:
    threads = 130
    block = np.zeros(64 * (threads + 8), np.int64)
    control = -(-block.ctypes.data // 64) * 64
    for asleep in (1, 62, 63, 64, 65, 127, 128, 129):
        flag(control, pool_module._ASLEEP, asleep).value = 1
        assert publish.call(control, 0, 0, 0, threads) == 1
        woken = [n for n in range(1, threads) if flag(control, pool_module._WAKE, n).value]
        assert woken == [asleep]


def test_the_caller_alone_finishes_a_program_if_nobody_comes() -> None:
    engine = CpuEngine(3)
    counter = Counter(engine)
    time.sleep(0.05)
    engine.pool._team._wake = lambda sleepers: None  # type: ignore[method-assign]
    counter.run(20)
    assert counter.right()


def test_threads_that_come_late_do_no_harm() -> None:
    """Who is to be woken is woken later, in the middle of any program or after its end."""
    engine = CpuEngine(3)
    counter, other = Counter(engine), Counter(engine, rows=40)
    team = engine.pool._team
    pending: queue.SimpleQueue[threading.Semaphore | None] = queue.SimpleQueue()

    def remember(sleepers: int) -> None:
        for thread in (1, 2) if sleepers else ():
            if flag(team._control, pool_module._WAKE, thread).value:
                pending.put(team._signals[thread])

    def wake() -> None:
        while (signal_of_thread := pending.get(timeout=SECONDS)) is not None:
            time.sleep(3e-4)
            signal_of_thread.release()

    team._wake = remember  # type: ignore[method-assign]
    waker = threading.Thread(target=wake, daemon=True)
    waker.start()
    for pause in np.random.default_rng(2).uniform(0.0, 1e-3, 300):
        counter.run()
        other.run()
        time.sleep(pause)
    pending.put(None)
    waker.join(SECONDS)
    assert counter.right()
    assert other.right()


def test_programs_of_too_many_sections_are_refused() -> None:
    pool, rows = Pool(2), np.zeros((1, ROW_LENGTH), np.int64)
    for sections in (0, MOST_SECTIONS + 1):
        with pytest.raises(InternalError, match=f"a program of {sections} sections cannot be run"):
            pool.run(rows, np.zeros(sections + 1, np.int64))


def test_more_threads_than_cores_finish() -> None:
    counter = Counter(CpuEngine(2 * (os.cpu_count() or 1) + 5), rows=40)
    counter.run(50)
    assert counter.right()


def test_idle_threads_sleep() -> None:
    counter = Counter(CpuEngine(3))
    counter.run(10)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    counter.run(10)
    assert counter.right()


def test_a_pool_that_nobody_holds_ends_its_threads() -> None:
    before = workers()
    for used in (False, True):
        engine: CpuEngine | None = CpuEngine(3)
        assert engine is not None
        own = workers() - before
        assert len(own) == 2
        if used:
            Counter(engine).run(3)
        del engine
        gc.collect()
        for thread in own:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in own)


def test_a_program_keeps_its_pool_and_its_memory() -> None:
    counter = Counter(CpuEngine(2))
    gc.collect()
    counter.run(20)
    assert counter.right()


def test_a_single_thread_starts_no_others() -> None:
    before = workers()
    pool = Pool(1)
    assert workers() - before == set()
    assert pool.threads == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("asleep", [False, True])
def test_a_forked_child_runs_programs_on_threads_of_its_own(asleep: bool) -> None:
    counter = Counter(CpuEngine(3))
    counter.run(10)
    if asleep:
        time.sleep(0.05)

    def work() -> bool:
        counter.run(50)
        # Python in a child knows only the threads that the child has started
        return counter.right() and len(workers()) == 2

    assert in_child(work) == 0
    # the parent's threads are as they were
    counter.run(50)
    assert counter.right()
    assert in_child(work) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_was_forked_while_a_program_ran_is_not_stuck() -> None:
    engine = CpuEngine(2)
    busy, counter = Counter(engine, rows=2000), Counter(engine)
    stop = threading.Event()

    def keep_running() -> None:
        while not stop.is_set():
            busy.run()

    thread = threading.Thread(target=keep_running, daemon=True)
    thread.start()

    def work() -> bool:
        counter.run(20)
        return counter.right()

    try:
        for _ in range(5):
            assert in_child(work) == 0
    finally:
        stop.set()
        thread.join(SECONDS)
    assert busy.right()


def _count(total: Any) -> None:
    counter = Counter(CpuEngine(2))
    counter.run(20)
    total.put(raw_bytes(counter.total))


def test_a_spawned_process_runs_programs() -> None:
    counter = Counter(CpuEngine(2))
    counter.run(20)
    context = multiprocessing.get_context("spawn")
    total = context.Queue()
    child = context.Process(target=_count, args=(total,))
    child.start()
    try:
        assert total.get(timeout=SECONDS) == raw_bytes(counter.total)
    finally:
        child.join(SECONDS)
        child.kill()
    assert child.exitcode == 0
