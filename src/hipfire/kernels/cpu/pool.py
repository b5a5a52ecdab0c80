"""The threads of the CPU engine: they walk a program of kernels together, with barriers in between.

A program is an array of rows of int64: whether a barrier comes first, the address of a kernel's machine
code, and its arguments. What lies between two barriers is a section; its work is cut into parts, which the
threads claim one by one. A section is done when its parts are, whoever did them: a thread that the system
keeps off its processor holds up nothing but the part that it is in, and the caller alone finishes a program
if no other thread comes. Between programs the threads spin for a moment, then sleep. No OpenMP is involved:
there is nothing to share with, or be upset by, the pools of other libraries. This file knows no kernel.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu.jit import Compiled, helper
from hipfire.kernels.cpu.simd import ADDRESS, LONG, load_long, operation, pointer, store_long
from hipfire.kernels.cpu.target import host_features

ROW_LENGTH = 24
ROW_BYTES = 8 * ROW_LENGTH
# arguments start behind the barrier flag and the address
FIRST_ARGUMENT = 2
# the most sections of a program
MOST_SECTIONS = 1 << 16

# byte offsets in the control block; from the last two on every thread has a line of its own
_GENERATION, _PROGRAM, _SECTIONS, _COUNT, _PARTS, _STATE, _STOP = 0, 64, 72, 80, 88, 96, 104
_ASLEEP, _WAKE = 192, 200
_LINE = 64
# a section's state: generation and claimed parts in one number, then finished parts
_STATE_BYTES, _DONE = 16, 8
_TAG_BITS = 32
_TAKEN = (1 << _TAG_BITS) - 1
_GENERATIONS = (1 << 31) - 1
# spins of an idle thread before it sleeps (some hundred microseconds), and of a waiting one before it yields
_IDLE_SPINS = 20_000
_WAIT_SPINS = 2_000


def _emit_call(builder: ir.IRBuilder, code: Any, arguments: Any, thread: Any, threads: Any) -> None:
    signature = ir.FunctionType(ir.VoidType(), [LONG, LONG, LONG])
    builder.call(builder.inttoptr(code, signature.as_pointer()), [arguments, thread, threads])


def _emit_pause(builder: ir.IRBuilder) -> None:
    if "sse2" in host_features():
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


def _emit_yield(builder: ir.IRBuilder) -> None:
    if os.name == "posix":
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])


def _emit_load(builder: ir.IRBuilder, address: Any) -> Any:
    return builder.load_atomic(pointer(builder, address, LONG), "seq_cst", 8)


def _emit_store(builder: ir.IRBuilder, address: Any, value: Any) -> None:
    builder.store_atomic(value, pointer(builder, address, LONG), "seq_cst", 8)


call_kernel = operation(types.void, (ADDRESS,) * 4, _emit_call)
pause = operation(types.void, (), _emit_pause)
give_way = operation(types.void, (), _emit_yield)
read = operation(types.int64, (ADDRESS,), _emit_load)
write = operation(types.void, (ADDRESS, types.int64), _emit_store)
increment = operation(
    types.int64,
    (ADDRESS,),
    lambda b, a: b.atomic_rmw("add", pointer(b, a, LONG), ir.Constant(LONG, 1), "seq_cst"),
)
exchange = operation(
    types.int64,
    (ADDRESS, types.int64),
    lambda b, a, v: b.atomic_rmw("xchg", pointer(b, a, LONG), v, "seq_cst"),
)
replace = operation(
    types.boolean,
    (ADDRESS, types.int64, types.int64),
    lambda b, a, old, new: b.extract_value(b.cmpxchg(pointer(b, a, LONG), old, new, "seq_cst", "seq_cst"), 1),
)


@helper
def _await(done: int, parts: int, control: int, generation: int) -> bool:
    """Wait until `parts` parts are done; False if another program was published meanwhile."""
    spins = 0
    while read(done) < parts:
        if read(control + _GENERATION) != generation:
            return False
        pause()
        spins += 1
        if spins > _WAIT_SPINS:
            give_way()
    return True


@helper
def _run_part(program: int, first: int, last: int, part: int, parts: int) -> None:
    place = program + ROW_BYTES * first
    for _ in range(first, last):
        call_kernel(load_long(place + 8), place + 8 * FIRST_ARGUMENT, part, parts)
        place += ROW_BYTES


@helper
def _claim(state: int, parts: int, generation: int) -> int:
    """Return a part of a section, this thread's now; -1 if none is left, -2 if the program is over."""
    while True:
        old = read(state)
        if old >> _TAG_BITS != generation:
            return -2
        if old & _TAKEN >= parts:
            return -1
        if replace(state, old, old + 1):
            return old & _TAKEN  # type: ignore[no-any-return]


def _walk(control: int, generation: int) -> int:
    """Take part in the program of this generation; returns 1 when its last section is done, 0 if it is over.

    A thread may come late, even when the next program is being written. It touches a program's memory only
    while it holds a part, for then the program cannot be over; the tags of the states tell it everything
    else.
    """
    program, sections = read(control + _PROGRAM), read(control + _SECTIONS)
    count, parts, state = read(control + _COUNT), read(control + _PARTS), read(control + _STATE)
    for section in range(count):
        place = state + _STATE_BYTES * section
        if section > 0 and not _await(place - _STATE_BYTES + _DONE, parts, control, generation):
            return 0
        part = _claim(place, parts, generation)
        while part >= 0:
            first, last = load_long(sections + 8 * section), load_long(sections + 8 * section + 8)
            _run_part(program, first, last, part, parts)
            increment(place + _DONE)
            part = _claim(place, parts, generation)
        if part == -2:
            return 0
    return 1 if _await(state + _STATE_BYTES * (count - 1) + _DONE, parts, control, generation) else 0


_walk_here = helper(_walk)


def _publish(control: int, program: int, sections: int, count: int, threads: int) -> int:
    """Publish a program; returns how many threads sleep and must be woken. `_WAKE` tells which."""
    generation = (read(control + _GENERATION) + 1) & _GENERATIONS
    state = read(control + _STATE)
    for section in range(count):
        # tags first: whoever reads what follows must find that the old program is over
        write(state + _STATE_BYTES * section, generation << _TAG_BITS)
        store_long(state + _STATE_BYTES * section + _DONE, 0)
    write(control + _PROGRAM, program)
    write(control + _SECTIONS, sections)
    write(control + _COUNT, count)
    write(control + _GENERATION, generation)
    sleepers = 0
    for thread in range(1, threads):
        asleep = exchange(control + _ASLEEP + _LINE * thread, 0)
        store_long(control + _WAKE + _LINE * thread, asleep)
        sleepers += asleep
    return sleepers


def _run_published(control: int) -> None:
    """Take part in the program that this thread has published, until it is done."""
    _walk_here(control, read(control + _GENERATION))


def _serve(control: int, thread: int, seen: int) -> int:
    """Take part in programs as they are published; returns the last generation when it is time to sleep.

    A thread that has announced its sleep must sleep until it is woken, even if a program came at that moment.
    """
    while True:
        spins = 0
        while read(control + _GENERATION) == seen:
            spins += 1
            if spins > _IDLE_SPINS:
                write(control + _ASLEEP + _LINE * thread, 1)
                if read(control + _GENERATION) == seen:
                    return seen
                if exchange(control + _ASLEEP + _LINE * thread, 0) == 0:
                    return seen
                break
            pause()
        seen = read(control + _GENERATION)
        if read(control + _STOP) != 0:
            return -1
        _walk_here(control, seen)


run_published = Compiled("pool-run", _run_published, 1, result=False)
publish = Compiled("pool-publish", _publish, 5, result=True)
serve = Compiled("pool-serve", _serve, 3, result=True)


def sections_of(program: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Return the first row of every section of the first `count` rows, and `count`: int64."""
    return np.concatenate(([0], np.flatnonzero(program[1:count, 0]) + 1, [count])).astype(np.int64)


class Pool:
    """`threads` threads, the caller's among them; programs run one at a time, whoever asks.

    After a fork the child starts threads of its own.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # into how many parts the work of a section is cut: what kernels are told as their number of threads.
        # twice as many were seen to cost 2 to 5 % of a decode step, in shorter runs through memory
        self.parts = threads
        for function in (run_published, publish, serve):
            # here, where the caller is told what is wrong, and not first in the threads
            function.compile()
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._team = _Team(self.threads, self.parts)
        self._finalizer = weakref.finalize(self, self._team.stop)

    def run(self, program: np.ndarray[Any, Any], sections: np.ndarray[Any, Any]) -> None:
        """Run a program, int64 [rows, ROW_LENGTH] in one piece, whose `sections_of` are given."""
        if os.getpid() != self._process:
            self._finalizer.detach()
            self._start()
        with self._lock:
            self._team.run(program.ctypes.data, sections.ctypes.data, len(sections) - 1)


class _Team:
    """The worker threads of one process and the memory through which they are told what to do."""

    def __init__(self, threads: int, parts: int) -> None:
        self.threads = threads
        size = _ASLEEP + _LINE * (threads + 2)
        self._block = np.zeros(size + _LINE + _STATE_BYTES * MOST_SECTIONS, np.uint8)
        self._control = -(-self._block.ctypes.data // _LINE) * _LINE
        ctypes.c_int64.from_address(self._control + _PARTS).value = parts
        ctypes.c_int64.from_address(self._control + _STATE).value = self._control + size
        self._signals = [threading.Semaphore(0) for _ in range(threads)]
        for thread in range(1, threads):
            arguments = (self._block, self._control, thread, self._signals[thread])
            threading.Thread(target=_work, args=arguments, daemon=True, name=f"hipfire-{thread}").start()

    def run(self, program: int, sections: int, count: int) -> None:
        if not 0 < count <= MOST_SECTIONS:
            raise InternalError(f"a program of {count} sections cannot be run")
        self._wake(publish.call(self._control, program, sections, count, self.threads))
        run_published.call(self._control)

    def stop(self) -> None:
        """End the worker threads; nothing may run on them any more."""
        ctypes.c_int64.from_address(self._control + _STOP).value = 1
        self._wake(publish.call(self._control, 0, 0, 0, self.threads))

    def _wake(self, sleepers: int) -> None:
        if sleepers == 0:
            return
        for thread in range(1, self.threads):
            if ctypes.c_int64.from_address(self._control + _WAKE + _LINE * thread).value:
                self._signals[thread].release()


def _work(block: Any, control: int, thread: int, signal: threading.Semaphore) -> None:
    """Serve until told to stop. `block` keeps the control memory alive as long as the thread."""
    seen = 0
    while seen >= 0:
        seen = serve.call(control, thread, seen)
        if seen >= 0:
            signal.acquire()
    del block
