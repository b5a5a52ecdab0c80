"""The workers of benchmarks/cpu_peers.py: their protocol and the peer's calls."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from peers.worker import BENCHMARKS, Worker, WorkerError, worker_environment

posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and scripts")
PROGRAM = """
import os, sys, time
from peers.serve import serve
def echo(**fields):
    print("noise")
    os.system("echo more noise")
    return fields
def fail():
    raise ValueError("no\\nsuch thing")
def die(code):
    print("first", "last words", sep="\\n", file=sys.stderr, flush=True)
    os._exit(code)
def talk():
    os.write(answers, b"{not json\\n")
    return {}
answers = os.dup(1)
handlers = {"echo": echo, "fail": fail, "die": die, "abort": os.abort, "talk": talk}
serve({**handlers, "sleep": lambda: time.sleep(600)})
"""


def start(program: str = PROGRAM) -> Worker:
    return Worker("test", [sys.executable, "-c", program], worker_environment(own=False))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_answers_are_not_disturbed_by_what_libraries_print() -> None:
    with start() as worker:
        assert worker.ask("echo", a=1, b=["ä", None]) == {"a": 1, "b": ["ä", None]}
        assert worker.ask("echo") == {}


def test_a_failure_is_one_line_and_the_worker_goes_on() -> None:
    with start() as worker:
        with pytest.raises(WorkerError) as caught:
            worker.ask("fail")
        assert caught.value.line() == "the test worker failed at 'fail': ValueError: no such thing"
        assert worker.ask("echo", a=1) == {"a": 1}


def test_a_worker_that_ends_says_its_last_words() -> None:
    with start() as worker:
        with pytest.raises(WorkerError) as caught:
            worker.ask("die", code=3)
        assert caught.value.line() == "the test worker ended at 'die' (exit code 3): last words"
        # and once more, when nobody reads the request
        with pytest.raises(WorkerError, match="exit code 3"):
            worker.ask("echo")


@posix
def test_a_worker_that_is_killed_names_the_signal() -> None:
    with start() as worker, pytest.raises(WorkerError, match=r"'abort' \(SIGABRT\)"):
        worker.ask("abort")


def test_a_worker_that_hangs_is_given_up_and_ended() -> None:
    with pytest.raises(WorkerError, match=r"did not answer to 'sleep' in 0\.5 s"), start() as worker:
        worker.ask("sleep", limit=0.5)
    assert gone(worker.pid)


def test_nonsense_is_refused() -> None:
    with start() as worker, pytest.raises(WorkerError, match=r"answered 'talk' with '\{not json'"):
        worker.ask("talk")


def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(WorkerError, match="the test worker cannot be started"):
        Worker("test", [str(BENCHMARKS / "none")], {})


def test_workers_end_with_their_input() -> None:
    worker = start()
    worker.close()
    assert gone(worker.pid)


def test_no_side_gets_variables_that_change_how_threads_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "active")
    monkeypatch.setenv("PYTHONPATH", "mine")
    peer, own = worker_environment(own=False), worker_environment(own=True)
    assert not [name for name in peer if name.startswith(("OMP", "GOMP", "MKL"))]
    assert {name: own[name] for name in own if name.startswith(("OMP", "GOMP", "MKL"))} == {
        "OMP_WAIT_POLICY": "passive"
    }
    assert peer["PYTHONPATH"] == str(BENCHMARKS)
    assert own["PYTHONPATH"] == os.pathsep.join([str(BENCHMARKS), "mine"])


class FakeLlama(types.ModuleType):
    """A stand-in for the peer's package; notes every call, and of batches what is in them."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.calls: list[Any] = []
        self.status = 0
        calls = self.calls

        class Llama:
            def __init__(self, path: str, **options: Any) -> None:
                calls.append(("open", path, options))
                self.ctx = "context"

            def reset(self) -> None:
                calls.append("reset")

            def eval(self, tokens: Sequence[int]) -> None:
                calls.append(("eval", list(tokens)))

            def close(self) -> None:
                calls.append("close")

        self.Llama = Llama

    def llama_batch_init(self, size: int, embeddings: int, sequences: int) -> Any:
        empty = [-1] * size
        fields = {name: list(empty) for name in ("token", "pos", "n_seq_id", "logits")}
        return types.SimpleNamespace(n_tokens=0, seq_id=[[-1] for _ in empty], **fields)

    def llama_batch_free(self, batch: Any) -> None:
        self.calls.append("free")

    def llama_get_memory(self, context: str) -> str:
        return f"memory of {context}"

    def llama_memory_clear(self, memory: str, data: bool) -> None:
        self.calls.append(("clear", memory, data))

    def llama_synchronize(self, context: str) -> None:
        self.calls.append("synchronize")

    def llama_decode(self, context: str, batch: Any) -> int:
        count = batch.n_tokens
        assert batch.n_seq_id[:count] == [1] * count
        assert batch.seq_id[:count] == [[0]] * count
        self.calls.append(("decode", batch.token[:count], batch.pos[:count], batch.logits[:count]))
        return self.status


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.delitem(sys.modules, "peers.llama_worker", raising=False)
    module = import_module("peers.llama_worker")
    monkeypatch.setattr(module, "BATCH", 4)
    yield fake, module.Sessions(3)
    sys.modules.pop("peers.llama_worker", None)


EMPTY = ["reset", ("clear", "memory of context", True)]


def test_the_peer_is_opened_with_and_without_flash_attention(llama: Any) -> None:
    fake, sessions = llama
    sessions.load("k", "m.gguf", 1024)
    opened = [call[2] for call in fake.calls]
    assert [options.pop("flash_attn") for options in opened] == [False, True]
    assert (
        opened[0]
        == opened[1]
        == {
            "n_ctx": 1024,
            "n_batch": 4,
            "n_ubatch": 4,
            "n_threads": 3,
            "n_threads_batch": 3,
            "logits_all": False,
            "verbose": False,
        }
    )
    fake.calls.clear()
    sessions.unload("k")
    assert fake.calls == ["free", "close"] * 2
    with pytest.raises(KeyError):
        sessions.pp("k", [1], "raw", True)


def test_the_peers_prefill_asks_for_the_last_logits_alone(llama: Any) -> None:
    fake, sessions = llama
    sessions.load("k", "m.gguf", 1024)
    fake.calls.clear()
    assert sessions.pp("k", [5, 6, 7, 8, 9, 10], "raw", False)["seconds"] > 0
    assert fake.calls == [
        *EMPTY,
        ("decode", [5, 6, 7, 8], [0, 1, 2, 3], [0, 0, 0, 0]),
        "synchronize",
        ("decode", [9, 10], [4, 5], [0, 1]),
        "synchronize",
    ]
    fake.calls.clear()
    assert sessions.pp("k", [5, 6], "eval", True)["seconds"] > 0
    assert fake.calls == [*EMPTY, ("eval", [5, 6]), "synchronize"]


def test_the_peers_decode_steps_follow_the_context(llama: Any) -> None:
    fake, sessions = llama
    sessions.load("k", "m.gguf", 1024)
    fake.calls.clear()
    assert sessions.tg("k", [1, 2], [[5, 6]], "raw", False)["seconds"] > 0
    steps = [("decode", [5], [2], [1]), ("decode", [6], [3], [1])]
    assert fake.calls == [*EMPTY, ("eval", [1, 2]), "synchronize", *steps, "synchronize"]
    fake.calls.clear()
    assert sessions.tg("k", [1, 2], [[5, 6]], "eval", False)["seconds"] > 0
    ends = [("eval", [5]), ("eval", [6]), "synchronize"]
    assert fake.calls == [*EMPTY, ("eval", [1, 2]), "synchronize", *ends]
    fake.status = 1
    with pytest.raises(RuntimeError, match="llama_decode returned 1"):
        sessions.tg("k", [1, 2], [[5, 6]], "raw", False)
