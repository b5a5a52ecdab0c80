"""A turn in the words of Anthropic's Messages API: the whole message, or the events of a stream.

Plain functions of the turn's events. Routes are in anthropic.py.
"""

from __future__ import annotations

import json
from typing import Any

from hipfire.engine.turn import Channel, Delta, Info, Started, TurnResult
from hipfire.server.errors import kind_of, message_of, status_of
from hipfire.server.sse import ErrorShape, data_frame

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def _body(error: Exception) -> dict[str, Any]:
    kind = _TYPES.get(status_of(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": message_of(error), "kind": kind_of(error)}}


def event_frame(value: dict[str, Any]) -> bytes:
    """Return one event of a stream; its name is the value's type."""
    return data_frame(value, value["type"])


ERRORS = ErrorShape(_body, lambda error: event_frame(_body(error)))
PING = event_frame({"type": "ping"})


class MessageWriter:
    """Turns the pieces of one reply into a message's blocks and, as they come, into a stream's frames.

    `limit` is the request's max_tokens. Without `thoughts`, blocks of reasoning are there but empty.
    """

    def __init__(self, reply_id: str, model: str, started: Started, *, limit: int, thoughts: bool) -> None:
        self._id = reply_id
        self._model = model
        self._started = started
        self._limit = limit
        self._thoughts = thoughts
        self._blocks: list[dict[str, Any]] = []
        self._begun = False
        self._channel: Channel | None = None
        self._notes: list[str] = []

    def take(self, event: Delta | Info) -> bytes:
        """Take an event; return its frames, which open the message and the block where needed."""
        if isinstance(event, Info):
            self._notes.append(event.message)
            return b""
        return self._piece(event) if event.text else b""

    def end(self, result: TurnResult) -> bytes:
        """Return the stream's last frames: tool calls, the way it ended, and what it cost."""
        frames = self._begin() + self._close()
        for block in self._call_blocks(result):
            index = len(self._blocks)
            self._blocks.append(block)
            frames += _start(index, {**block, "input": {}})
            text = json.dumps(block["input"], ensure_ascii=False)
            frames += _delta(index, {"type": "input_json_delta", "partial_json": text}) + _stop(index)
        ending = {"stop_reason": self._reason(result), "stop_sequence": result.stop}
        frames += event_frame(
            {"type": "message_delta", "delta": ending, "usage": _usage(result), **self._told(result)}
        )
        return frames + event_frame({"type": "message_stop"})

    def message(self, result: TurnResult) -> dict[str, Any]:
        """Return the whole message, after all pieces."""
        made = self._message()
        made["content"] = [*self._blocks, *self._call_blocks(result)]
        made |= {"stop_reason": self._reason(result), "stop_sequence": result.stop, "usage": _usage(result)}
        return {**made, **self._told(result)}

    def _piece(self, delta: Delta) -> bytes:
        frames = self._begin()
        if delta.channel != self._channel:
            frames += self._close() + self._open(delta.channel)
        index, block = len(self._blocks) - 1, self._blocks[-1]
        if delta.channel == "answer":
            block["text"] += delta.text
            return frames + _delta(index, {"type": "text_delta", "text": delta.text})
        if not self._thoughts:
            return frames
        block["thinking"] += delta.text
        return frames + _delta(index, {"type": "thinking_delta", "thinking": delta.text})

    def _message(self) -> dict[str, Any]:
        cached = self._started.cached_tokens
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self._started.prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": 0,
            },
        }

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return event_frame({"type": "message_start", "message": self._message()})

    def _open(self, channel: Channel) -> bytes:
        self._channel = channel
        block = {"type": "text", "text": ""}
        if channel == "reasoning":
            # the API wants a signature; nothing here would check one
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self._blocks.append(block)
        return _start(len(self._blocks) - 1, block)

    def _close(self) -> bytes:
        if self._channel is None:
            return b""
        index, channel = len(self._blocks) - 1, self._channel
        self._channel = None
        if channel == "reasoning":
            return _delta(index, {"type": "signature_delta", "signature": ""}) + _stop(index)
        return _stop(index)

    def _call_blocks(self, result: TurnResult) -> list[dict[str, Any]]:
        return [
            {
                "type": "tool_use",
                "id": f"toolu-{self._id}-{number}",
                "name": call.name,
                "input": dict(call.arguments),
            }
            for number, call in enumerate(result.calls)
        ]

    def _told(self, result: TurnResult) -> dict[str, Any]:
        warnings = [*result.warnings, *self._notes]
        return {"hipfire": {"config_warnings": warnings}} if warnings else {}

    def _reason(self, result: TurnResult) -> str:
        if result.finish == "tool_calls":
            return "tool_use"
        if result.finish == "length":
            full = result.usage.completion < self._limit
            return "model_context_window_exceeded" if full else "max_tokens"
        return "end_turn" if result.stop is None else "stop_sequence"


def _usage(result: TurnResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _start(index: int, block: dict[str, Any]) -> bytes:
    return event_frame({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return event_frame({"type": "content_block_delta", "index": index, "delta": delta})


def _stop(index: int) -> bytes:
    return event_frame({"type": "content_block_stop", "index": index})
