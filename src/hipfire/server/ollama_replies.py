"""A turn, and the models on this disk, in the words of Ollama's API.

Plain functions of events and entries. Routes are in ollama.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hipfire.engine.turn import Delta, Info, TextLogprob, TurnResult
from hipfire.server.errors import message_of
from hipfire.server.model_facts import ModelFacts
from hipfire.server.service import ModelEntry
from hipfire.server.sse import ErrorShape, to_json

NDJSON = "application/x-ndjson"
# blanks before a JSON text change nothing, and an empty line would end clients that parse every line
KEEPALIVE = b" "
# a time so far away that it means "never"
_FOREVER = datetime(9999, 12, 31, tzinfo=UTC)


def line(value: dict[str, Any]) -> bytes:
    """Return one line of a stream."""
    return to_json(value) + b"\n"


def _body(error: Exception) -> dict[str, Any]:
    return {"error": message_of(error)}


ERRORS = ErrorShape(_body, lambda error: line(_body(error)))


def time_text(moment: datetime) -> str:
    """Return an RFC 3339 time in UTC."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaWriter:
    """Turns the pieces of one reply into Ollama's objects. `chat` chooses between its two routes' shapes."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model = model
        self._chat = chat
        self._texts = {"answer": "", "reasoning": ""}
        self._logprobs: list[dict[str, Any]] = []
        self._notes: list[str] = []

    def take(self, event: Delta | Info) -> dict[str, Any] | None:
        """Take an event; return the object that tells it, None if there is nothing to tell."""
        if isinstance(event, Info):
            self._notes.append(event.message)
            return None
        return self._piece(event) if event.text or event.logprobs else None

    def calls(self, result: TurnResult) -> dict[str, Any] | None:
        """Return the object that tells the tool calls, None if there are none."""
        if not result.calls:
            return None
        made = self._object("", "")
        made["message"]["tool_calls"] = _calls(result)
        return {**made, "done": False}

    def last(self, result: TurnResult, *, load_ns: int, total_ns: int) -> dict[str, Any]:
        """Return the object that ends a stream: how the reply ended and what it cost, in nanoseconds."""
        return {**self._object("", ""), **_ending(result, self._notes, load_ns=load_ns, total_ns=total_ns)}

    def whole(self, result: TurnResult, *, load_ns: int, total_ns: int) -> dict[str, Any]:
        """Return the whole reply, after all pieces."""
        made = self._object(self._texts["answer"], self._texts["reasoning"])
        if result.calls:
            made["message"]["tool_calls"] = _calls(result)
        if self._logprobs:
            made["logprobs"] = self._logprobs
        return {**made, **_ending(result, self._notes, load_ns=load_ns, total_ns=total_ns)}

    def loaded(self, warnings: Sequence[str]) -> dict[str, Any]:
        """Return the reply to a request that only loads a model."""
        told = {"hipfire": {"config_warnings": list(warnings)}} if warnings else {}
        return {**self._object("", ""), "done": True, "done_reason": "load", **told}

    def _piece(self, delta: Delta) -> dict[str, Any]:
        self._texts[delta.channel] += delta.text
        logprobs = [_logprob(each) for each in delta.logprobs]
        self._logprobs += logprobs
        answer = delta.text if delta.channel == "answer" else ""
        thinking = delta.text if delta.channel == "reasoning" else ""
        made = self._object(answer, thinking)
        return {**made, "done": False, **({"logprobs": logprobs} if logprobs else {})}

    def _object(self, answer: str, thinking: str) -> dict[str, Any]:
        made: dict[str, Any] = {"model": self._model, "created_at": time_text(datetime.now(UTC))}
        extra = {"thinking": thinking} if thinking else {}
        if self._chat:
            made["message"] = {"role": "assistant", "content": answer, **extra}
            return made
        return {**made, "response": answer, **extra}


def _ending(result: TurnResult, notes: Sequence[str], *, load_ns: int, total_ns: int) -> dict[str, Any]:
    usage, timings = result.usage, result.timings
    decode_ms = max(0.0, timings.latency_ms - timings.queue_ms - timings.prefill_ms)
    made: dict[str, Any] = {
        "done": True,
        # a reply that ends with calls has come to its end
        "done_reason": "length" if result.finish == "length" else "stop",
        "total_duration": total_ns,
        "load_duration": load_ns,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": int(timings.prefill_ms * 1e6),
        "eval_count": usage.completion,
        "eval_duration": int(decode_ms * 1e6),
        "hipfire": {"cached_tokens": usage.cached},
    }
    if warnings := [*result.warnings, *notes]:
        made["hipfire"]["config_warnings"] = warnings
    return made


def _calls(result: TurnResult) -> list[dict[str, Any]]:
    return [
        {"function": {"index": index, "name": call.name, "arguments": dict(call.arguments)}}
        for index, call in enumerate(result.calls)
    ]


def _logprob(token: TextLogprob) -> dict[str, Any]:
    made: dict[str, Any] = {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
    if token.top:
        made["top_logprobs"] = [_logprob(each) for each in token.top]
    return made


def tags(entries: Sequence[ModelEntry]) -> dict[str, Any]:
    """Return the list of models."""
    return {"models": [{**_entry(each), "modified_at": _modified(each)} for each in entries]}


def running(entry: ModelEntry | None, *, context: int, idle_s: float) -> dict[str, Any]:
    """Return the list of models in memory: the resident one, if there is one."""
    if entry is None:
        return {"models": []}
    until = datetime.now(UTC) + timedelta(seconds=idle_s) if idle_s else _FOREVER
    made = {**_entry(entry), "size_vram": 0, "expires_at": time_text(until), "context_length": context}
    return {"models": [made]}


def show(entry: ModelEntry, facts: ModelFacts) -> dict[str, Any]:
    """Return what is known about one model."""
    abilities = {"completion": True, "tools": facts.tools, "thinking": facts.thinking}
    return {
        "modelfile": f"FROM {entry.id}\n",
        "parameters": "",
        "template": facts.template,
        "modified_at": _modified(entry),
        "details": {**_details(entry, facts.architecture), "parameter_size": _count(facts.parameters)},
        "model_info": {
            "general.architecture": facts.architecture,
            "general.parameter_count": facts.parameters,
            f"{facts.architecture or 'model'}.context_length": facts.context,
        },
        "capabilities": [name for name, able in abilities.items() if able],
    }


def _entry(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.id,
        "model": entry.id,
        "size": entry.size,
        "digest": entry.digest,
        "details": _details(entry, entry.family),
    }


def _details(entry: ModelEntry, family: str) -> dict[str, Any]:
    kind = "gguf" if entry.path.suffix == ".gguf" else "safetensors" if entry.path.is_dir() else "hfq"
    return {
        "parent_model": "",
        "format": kind,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": entry.format,
    }


def _modified(entry: ModelEntry) -> str:
    return time_text(datetime.fromtimestamp(entry.modified, UTC))


def _count(parameters: int) -> str:
    if parameters >= 10**9:
        return f"{parameters / 1e9:.1f}B"
    return f"{parameters / 1e6:.0f}M" if parameters >= 10**6 else str(parameters)
