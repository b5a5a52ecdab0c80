"""The peer's worker: llama.cpp through `llama-cpp-python`, run by the Python of its own environment.

Every measurement has four variants, so that the asking program can take the best one for the peer: with and
without flash attention, and through the package's `Llama.eval` or llama.cpp's own `llama_decode`. Filling a
batch for the latter is not timed where it can be done in advance. Only the last token's logits are
computed. This file knows neither hipfire nor what its times are compared with.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp

from peers.serve import serve

# tokens that one call may take; the asking program's prompts are not longer as a rule
BATCH = 512


class Session:
    """One model with one context of `n_ctx` tokens."""

    def __init__(self, path: str, *, threads: int, n_ctx: int, flash: bool) -> None:
        self._llama = llama_cpp.Llama(
            path,
            n_ctx=n_ctx,
            n_batch=BATCH,
            n_ubatch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash,
            logits_all=False,
            verbose=False,
        )
        self._context = self._llama.ctx
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def clear(self) -> None:
        """Empty the context."""
        self._llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def prefill(self, tokens: Sequence[int], call: str) -> float:
        """Return the seconds of reading a prompt into the empty context."""
        self.clear()
        if call == "eval":
            began = time.perf_counter()
            self._llama.eval(tokens)
            llama_cpp.llama_synchronize(self._context)
            return time.perf_counter() - began
        seconds = 0.0
        for start in range(0, len(tokens), BATCH):
            self._fill(tokens[start : start + BATCH], start, last=start + BATCH >= len(tokens))
            began = time.perf_counter()
            self._decode()
            llama_cpp.llama_synchronize(self._context)
            seconds += time.perf_counter() - began
        return seconds

    def decode(self, context: Sequence[int], tokens: Sequence[int], call: str) -> float:
        """Return the seconds of feeding `tokens` one by one after `context`."""
        self.clear()
        self._llama.eval(context)
        llama_cpp.llama_synchronize(self._context)
        if call == "eval":
            began = time.perf_counter()
            for token in tokens:
                self._llama.eval([token])
            llama_cpp.llama_synchronize(self._context)
            return time.perf_counter() - began
        self._fill([0], len(context), last=True)
        batch = self._batch
        began = time.perf_counter()
        for position, token in enumerate(tokens, len(context)):
            batch.token[0] = token
            batch.pos[0] = position
            self._decode()
        llama_cpp.llama_synchronize(self._context)
        return time.perf_counter() - began

    def close(self) -> None:
        """Release the model."""
        llama_cpp.llama_batch_free(self._batch)
        self._llama.close()

    def _fill(self, tokens: Sequence[int], start: int, *, last: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = 0
        batch.logits[len(tokens) - 1] = int(last)

    def _decode(self) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")


class Sessions:
    """The sessions in use, by the key of their model and their attention, and the answers to requests."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._open: dict[tuple[str, bool], Session] = {}

    def info(self) -> dict[str, Any]:
        """Return versions and llama.cpp's own words about what it was built for."""
        system = llama_cpp.llama_print_system_info().decode("utf-8", "replace")
        return {"version": llama_cpp.__version__, "system": system, "python": platform.python_version()}

    def load(self, key: str, path: str, n_ctx: int) -> dict[str, Any]:
        """Open a model with and without flash attention."""
        for flash in (False, True):
            self._open[key, flash] = Session(path, threads=self._threads, n_ctx=n_ctx, flash=flash)
        return {}

    def unload(self, key: str) -> dict[str, Any]:
        """Close a model."""
        for session in self._of(key):
            session.close()
        return {}

    def pp(self, key: str, tokens: Sequence[int], call: str, flash: bool) -> dict[str, Any]:
        """Time a prefill."""
        return {"seconds": self._open[key, flash].prefill(tokens, call)}

    def tg(
        self, key: str, context: Sequence[int], rows: Sequence[Sequence[int]], call: str, flash: bool
    ) -> dict[str, Any]:
        """Time decode steps of a single sequence."""
        (tokens,) = rows
        return {"seconds": self._open[key, flash].decode(context, tokens, call)}

    def requantize(self, source: str, out: str, ftype: int) -> dict[str, Any]:
        """Write a copy of a model in one of llama.cpp's file types, from whatever format it is in."""
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = ftype
        params.allow_requantize = True
        params.nthread = self._threads
        status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
        if status != 0:
            raise RuntimeError(f"llama_model_quantize returned {status}")
        return {}

    def _of(self, key: str) -> Iterator[Session]:
        for each in [each for each in self._open if each[0] == key]:
            yield self._open.pop(each)


def main() -> None:
    """Serve with as many threads as the command line says."""
    sessions = Sessions(int(sys.argv[1]))
    names = ("info", "load", "unload", "pp", "tg", "requantize")
    serve({name: getattr(sessions, name) for name in names})


if __name__ == "__main__":
    main()
