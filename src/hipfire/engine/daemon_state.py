"""What the daemon does with each message: the resident model, the turns that run, one reply to everything.

This file knows no pipe and no torch: lines come in through `handle`, lines go out through `send`, and models
come from a `Loader`. One thread calls everything.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

from hipfire import __version__
from hipfire.base import log
from hipfire.base.errors import HipfireError, ValidationError
from hipfire.engine.daemon_parts import Loader, Resident
from hipfire.engine.scheduler import BusyError
from hipfire.engine.turn import TERMINALS, Aborted, Event, TurnKey
from hipfire.engine.wire import (
    CONTRACT_VERSION,
    TURN_CONTROLS,
    decode_key,
    decode_message,
    decode_request,
    encode_event,
    message_type,
    parse_line,
    reply_line,
    request_number,
)
from hipfire.engine.wire_errors import error_line, failed
from hipfire.engine.wire_messages import (
    BenchDecode,
    BenchPrefill,
    Configure,
    Diag,
    Load,
    Ping,
    RedlineCapture,
    RedlineShadow,
    Reset,
    Unload,
)

# longest time between two looks at the core's deadlines, in seconds
LONGEST_WAIT: Final = 60.0

Reply = dict[str, Any]


class DaemonState:
    """Carries messages out. `send` writes a line; `ending` tells that the process was asked to end."""

    def __init__(
        self, loader: Loader, send: Callable[[bytes], None], *, ending: Callable[[], bool] = lambda: False
    ) -> None:
        self._loader = loader
        self._send = send
        self._ending = ending
        self._resident: Resident | None = None
        self._live: set[TurnKey] = set()
        self._loads = self._epoch = 0
        self._checked = True
        self._integrity = "ok"
        self._began = time.monotonic()
        self._handlers: dict[type, Callable[[Any, int | None], Reply]] = {
            Configure: self._configure,
            Ping: lambda message, request: {"type": "pong"},
            Load: self._load,
            Unload: self._unload,
            Reset: self._reset,
            Diag: self._diag,
            BenchPrefill: self._bench_prefill,
            BenchDecode: self._bench_decode,
            RedlineCapture: self._redline_capture,
            RedlineShadow: self._redline_shadow,
        }

    def handle(self, line: bytes) -> None:
        """Carry one line out and answer it; whatever is wrong with it is answered by `error`."""
        request = None
        try:
            record = parse_line(line)
            request = request_number(record)
            kind = message_type(record)
            if kind == "generate":
                self._generate(record)
            elif kind in TURN_CONTROLS:
                self._control(kind, decode_key(record))
            else:
                message = decode_message(record)
                reply = self._handlers[type(message)](message, request)
                self._write(reply if request is None else {**reply, "request": request})
        except Exception as error:
            _note(error)
            self._write(error_line(error, request=request, model_loaded=self._resident is not None))

    def step(self) -> bool:
        """Run one step of the core; False when there is nothing to do until a message or `wait_s`."""
        if self._resident is None:
            return False
        if self._resident.core.step():
            self._checked = False
            return True
        if not self._live and not self._checked:
            self._check()
        return False

    def wait_s(self) -> float | None:
        """Return in how many seconds `step` must be called although nothing arrives; None: never."""
        wait = None if self._resident is None else self._resident.core.wait_s()
        return None if wait is None else min(max(wait, 0.0), LONGEST_WAIT)

    def end(self, reason: str) -> None:
        """End all turns with a terminal each."""
        if self._resident is not None:
            try:
                self._resident.core.abort_all(reason)
            except Exception as error:
                _note(error)
        for key in tuple(self._live):
            self._sink(Aborted(key, reason))

    def fail_all(self, error: Exception) -> None:
        """End all turns with an error, without asking the core for anything."""
        for key in tuple(self._live):
            self._sink(failed(key, error))

    def _generate(self, record: Mapping[str, Any]) -> None:
        key = decode_key(record)
        if key in self._live:
            # an event under this key would be taken for the running turn's
            raise ValidationError(
                f"turn {key.id!r}, attempt {key.attempt}, is running", hint="use another attempt_id"
            )
        self._live.add(key)
        try:
            request = decode_request(record)
            self._require().core.submit(request, self._sink)
        except Exception as error:
            _note(error)
            self._sink(failed(key, error))

    def _control(self, kind: str, key: TurnKey) -> None:
        """Cancel, commit or abort a turn; one that has ended is nobody's concern any more."""
        if self._resident is not None and key in self._live:
            getattr(self._resident.core, kind)(key)

    def _sink(self, event: Event) -> None:
        """Write a turn's event; what comes after its terminal is dropped.

        One that cannot be written ends its turn: the client is told here, and the core by the error raised.
        """
        if event.key not in self._live:
            return
        try:
            line = reply_line(encode_event(event))
        except HipfireError as error:
            self._sink(failed(event.key, error))
            raise
        if isinstance(event, TERMINALS):
            self._live.discard(event.key)
            self._checked = False
        self._send(line)

    def _configure(self, message: Configure, _: int | None) -> Reply:
        if self._loads:
            raise ValidationError("a model was loaded already", hint="configure before the first load")
        self._loader.configure(message.config)
        return {
            "type": "configured",
            "version": __version__,
            "contract_version": CONTRACT_VERSION,
            "pid": os.getpid(),
        }

    def _load(self, message: Load, request: int | None) -> Reply:
        def progress(done: int, total: int, what: str) -> None:
            if self._ending():
                raise BusyError("the engine ends")
            note = {"type": "loading", "done": done, "total": total, "what": what}
            self._write(note if request is None else {**note, "request": request})

        self._require_idle("load", message.force)
        self._loader.admit(message, self._resident)
        self._drop("another model is loaded")
        self._loads += 1
        self._resident = self._loader.load(message, progress)
        return {"type": "loaded", **self._resident.describe()}

    def _unload(self, message: Unload, _: int | None) -> Reply:
        self._require_idle("unload", message.force)
        self._drop("the model is unloaded")
        return {"type": "unloaded"}

    def _reset(self, message: Reset, _: int | None) -> Reply:
        self._require_idle("reset", message.force)
        rolled_back = bool(self._live)
        self.end("the cache is reset")
        if self._resident is not None:
            self._resident.core.reset()
        self._epoch += 1
        return {
            "type": "reset",
            "attempt_id": message.attempt_id,
            "rolled_back": rolled_back,
            "state_epoch": self._epoch,
            "seq_pos": 0,
            "conversation_len": 0,
            "retry_reset_eligible": True,
        }

    def _diag(self, _: Diag, __: int | None) -> Reply:
        resident = self._resident
        described = resident.describe() if resident is not None else {}
        return {
            "type": "diag",
            **self._loader.diag(),
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._began, 3),
            "model_loaded": resident is not None,
            "model": described.get("model"),
            "model_arch": described.get("arch"),
            "device": described.get("device"),
            "model_memory": described.get("memory"),
            "turns": len(self._live),
            "integrity": self._integrity,
            "stats": resident.core.stats() if resident is not None else {},
        }

    def _bench_prefill(self, message: BenchPrefill, _: int | None) -> Reply:
        return {"type": "prefill_result", **self._bench().bench_prefill(message.tokens)}

    def _bench_decode(self, message: BenchDecode, _: int | None) -> Reply:
        result = self._bench().bench_decode(message.context_tokens, message.iterations)
        return {"type": "decode_result", **result}

    def _redline_capture(self, message: RedlineCapture, _: int | None) -> Reply:
        result = self._bench().redline_capture(message.context_tokens, message.batch)
        return {"type": "redline_capture_result", **result}

    def _redline_shadow(self, message: RedlineShadow, _: int | None) -> Reply:
        found = self._bench().redline_shadow(message.context_tokens, message.positions, message.batch)
        return {"type": "redline_shadow_result", **found}

    def _bench(self) -> Resident:
        self._require_idle("bench", force=False)
        resident = self._require()
        # what is measured overwrites the rows that cached prefixes lie in
        resident.core.reset()
        return resident

    def _require(self) -> Resident:
        if self._resident is None:
            raise BusyError("no model is loaded", hint="load one first")
        return self._resident

    def _require_idle(self, what: str, force: bool) -> None:
        if self._live and not force:
            raise BusyError(
                f"{what} is not possible while turns run ({len(self._live)})",
                hint="wait until they end, or force it",
            )

    def _drop(self, reason: str) -> None:
        if self._resident is None:
            return
        self.end(reason)
        resident, self._resident = self._resident, None
        try:
            resident.close()
        finally:
            del resident
            self._integrity = "ok"
            self._loader.reclaim()

    def _check(self) -> None:
        """Let the idle core check its books; a fault is told by `diag` and in the log."""
        self._checked = True
        try:
            self._require().core.integrity_check()
        except HipfireError as error:
            self._integrity = error.line()
            _note(error)

    def _write(self, record: Mapping[str, Any]) -> None:
        self._send(reply_line(record))


def _note(error: Exception) -> None:
    """Write an error to the log; with its traceback if it is a fault of the engine."""
    log.logger().warning(f"{type(error).__name__}: {error}")
    if not isinstance(error, HipfireError):
        traceback.print_exception(error, file=sys.stderr)
