"""The turns of a run: which messages are sent, what is kept of each reply, and which flags it raises.

In battery mode each turn is a conversation of its own; in chain and session mode one conversation grows with
the model's own replies. This file does not know processes, verdicts or files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hipfire.validate.detect import attractor, leaked_markers, missing_texts, words_of
from hipfire.validate.detectors import Text, Trace, run_detectors
from hipfire.validate.detectors_check import DETECTORS
from hipfire.validate.harness_client import Reply
from hipfire.validate.harness_options import Mode
from hipfire.validate.identity import md5
from hipfire.validate.prompts import Script, Turn

PREVIEW: Final = 90
# calls that lead to calls: a model that never answers is cut off
MAX_STEPS: Final = 4
Row = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests are made: the model's name, the fields of each, and whether reasoning goes back."""

    model: str
    fields: Mapping[str, Any]
    rich: bool = True

    def body(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the exact bytes of a request."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
            **({"tools": list(tools)} if tools else {}),
        }
        # half of a surrogate pair becomes the escape that it is in JSON
        return json.dumps(body, ensure_ascii=False).encode(errors="backslashreplace")


def run_script(
    script: Script,
    mode: Mode,
    asking: Asking,
    post: Callable[[bytes], Reply],
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Send every turn and return a row for each request; a conversation ends at the first broken reply."""
    rows: list[Row] = []
    opening: list[Message] = [{"role": "system", "content": script.system}] if script.system else []
    messages = list(opening)
    for number, turn in enumerate(script.turns, 1):
        if mode == "battery":
            messages = list(opening)
        messages.append({"role": "user", "content": turn.content})
        for step in range(1, MAX_STEPS + 1):
            body = asking.body(messages, script.tools)
            reply = post(body)
            row = make_row(turn, reply, body, turn_number=number, step=step)
            rows.append(row)
            on_row(row)
            messages.append(_history(reply, rich=asking.rich))
            if not reply.tool_calls or not turn.tool_results or reply.fault:
                break
            messages += [_tool_result(call, turn) for call in reply.tool_calls]
        if rows[-1]["fault"] and mode != "battery":
            break
    return rows


def make_row(turn: Turn, reply: Reply, body: bytes, *, turn_number: int, step: int) -> Row:
    """Return what is recorded of one reply."""
    calls = json.dumps(reply.tool_calls, ensure_ascii=False) if reply.tool_calls else ""
    visible = reply.content + calls
    # what a tool was asked is visible; what was only thought is no answer
    answer = reply.content or calls
    expected = turn.expect if not (turn.tool_results and reply.tool_calls) else ()
    tool_fault = _tool_fault(turn, reply, step)
    return {
        "turn": turn_number,
        "step": step,
        "genre": turn.genre,
        "request_id": reply.id,
        "status": reply.status,
        "fault": reply.fault,
        "finish": reply.finish,
        **_counts(reply),
        "think_words": len(reply.reasoning.split()),
        "ans_words": len(reply.content.split()),
        **_times(reply),
        "attractor": attractor(words_of(reply.reasoning, visible)).to_json(),
        "empty": not reply.fault and not visible.strip(),
        "runaway": reply.finish == "length",
        "expected_substrings": list(expected),
        "retrieval_missing": list(missing_texts(expected, answer)),
        "markup_leak": list(leaked_markers(reply.content)),
        "tool_fault": tool_fault,
        "detectors": run_detectors(_trace(reply), DETECTORS),
        "warnings": list(reply.hipfire.get("config_warnings") or ()),
        "prompt": turn.content,
        "prompt_md5": md5(turn.content.encode()),
        "request_md5": md5(body),
        "ans_preview": " ".join(answer.split())[:PREVIEW],
        "assistant_content": answer,
        "content": reply.content,
        "reasoning_content": reply.reasoning,
        "tool_calls": reply.tool_calls,
    }


def _counts(reply: Reply) -> Row:
    """Return the numbers of tokens of the prompt, of its reused part, and of the reply; None if not told."""
    details = reply.usage.get("prompt_tokens_details") or {}
    return {
        "ctx": reply.usage.get("prompt_tokens"),
        "cached": details.get("cached_tokens"),
        "gen": reply.usage.get("completion_tokens"),
    }


def _times(reply: Reply) -> Row:
    """Return the server's own times, with the client's where the server gives none."""
    rate = reply.timings.get("decode_tok_s")
    tokens = reply.usage.get("completion_tokens") or 0
    estimated = not rate and reply.ttft_s is not None and reply.wall_s > reply.ttft_s and tokens > 1
    if estimated and reply.ttft_s is not None:
        rate = (tokens - 1) / (reply.wall_s - reply.ttft_s)
    return {
        "prefill_ms": reply.timings.get("prefill_ms"),
        "prefill_tok_s": reply.timings.get("prefill_tok_s"),
        "decode_tok_s": rate,
        "decode_estimated": estimated,
        "ttft_s": reply.ttft_s,
        "wall_s": reply.wall_s,
        "timings": reply.timings,
    }


def _trace(reply: Reply) -> Trace:
    return Trace(tuple(Text(text, t_ms) for t_ms, text in reply.pieces))


def _tool_fault(turn: Turn, reply: Reply, step: int) -> str:
    """Return how the round trip of a tool call is broken, "" if it is not."""
    if reply.fault:
        return ""
    if reply.tool_calls and reply.finish != "tool_calls":
        return f"calls with finish {reply.finish!r}"
    if reply.finish == "tool_calls" and not reply.tool_calls:
        return "finish 'tool_calls' without a call"
    for call in reply.tool_calls:
        function = call["function"]
        if not function["name"]:
            return "a call without a name"
        if not _is_object(function["arguments"]):
            return f"arguments of {function['name']} are not a JSON object"
        if function["name"] not in turn.tool_results:
            return f"{function['name']} was called, for which there is no result"
    if turn.tool_results and step == 1 and not reply.tool_calls:
        return "no tool was called"
    if turn.tool_results and step == MAX_STEPS and reply.tool_calls:
        return f"still calling tools after {MAX_STEPS} requests"
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _history(reply: Reply, *, rich: bool) -> Message:
    """Return a reply as a message of the conversation."""
    message: Message = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if rich and reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = reply.tool_calls
    return message


def _tool_result(call: Mapping[str, Any], turn: Turn) -> Message:
    name = call["function"]["name"]
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": name,
        "content": turn.tool_results.get(name, "no such tool"),
    }
