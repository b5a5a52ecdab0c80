"""The requests that are timed: chats one by one and at once, one chunk of a prompt, a long one, a short one
beside it.

This file does not know rounds, and starts no server.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hipfire.validate.harness_client import Reply, chat
from peers.report import OWN
from peers.serve_servers import ServeError, Side, post_json

TIMEOUT_SECONDS = 600.0
# tokens of the reply to the short request, of which the first is timed
SHORT_TOKENS = 8


def one_by_one(side: Side, questions: Sequence[str], tokens: int) -> dict[str, float]:
    """Hold chats one after another; the medians of their own figures are those of a single request."""
    began = time.perf_counter()
    replies = [ask(side, question, tokens) for question in questions]
    wall = time.perf_counter() - began
    rates = [rate for reply in replies if (rate := decode_rate(reply, tokens)) is not None]
    if not rates:
        raise ServeError(f"no reply of {side.name} came in several pieces")
    return {
        "serial_s": wall,
        "serial_tok_s": sum(count(reply, tokens) for reply in replies) / wall,
        "ttft_ms": statistics.median(first_ms(side, reply) for reply in replies),
        "decode_tok_s": statistics.median(rates),
    }


def at_once(side: Side, questions: Sequence[str], tokens: int) -> dict[str, float]:
    """Hold chats at the same time, a connection each."""
    start = threading.Barrier(len(questions) + 1)

    def one(question: str) -> Reply:
        start.wait(TIMEOUT_SECONDS)
        return ask(side, question, tokens)

    with ThreadPoolExecutor(len(questions)) as pool:
        asked = [pool.submit(one, question) for question in questions]
        start.wait(TIMEOUT_SECONDS)
        began = time.perf_counter()
        replies = [each.result() for each in asked]
        wall = time.perf_counter() - began
    return {
        "together_s": wall,
        "together_tok_s": sum(count(reply, tokens) for reply in replies) / wall,
        "together_ttft_ms": statistics.median(first_ms(side, reply) for reply in replies),
    }


def chunk(side: Side, text: str, tokens: int) -> dict[str, float]:
    """Have a prompt of exactly `tokens` tokens read that nothing is known of, alone, for one token of reply.

    `chunk_ms` is what the server itself says the reading took, where it does, else the request's wall time,
    which is also `chunk_wall_ms`.
    """
    body = {"model": side.model, "prompt": text, "max_tokens": 1, "temperature": 0}
    answer, wall = post_json(side, "/v1/completions", body, TIMEOUT_SECONDS)
    usage, timings = _mapping(answer.get("usage")), _mapping(answer.get("timings"))
    cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens", 0)
    if (usage.get("prompt_tokens"), cached) != (tokens, 0):
        raise ServeError(
            f"{side.name} read {usage.get('prompt_tokens')} tokens, {cached} of them known,"
            f" instead of {tokens} new ones"
        )
    return {"chunk_ms": float(timings.get("prefill_ms", 1000 * wall)), "chunk_wall_ms": 1000 * wall}


def long_alone(side: Side, text: str) -> dict[str, float]:
    """Have a long prompt read alone."""
    return {"long_s": first_ms(side, ask(side, text, 1)) / 1000}


def beside(side: Side, text: str, question: str, delay: float) -> dict[str, float] | None:
    """Ask something short `delay` seconds after a long prompt; None if that had been read by then."""
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        long = pool.submit(ask, side, text, 1)
        time.sleep(delay)
        sent = time.perf_counter() - began
        short = ask(side, question, SHORT_TOKENS)
        read = first_ms(side, long.result()) / 1000
    return {"beside_ms": first_ms(side, short)} if sent < read else None


def ask(side: Side, content: str, tokens: int) -> Reply:
    """Return the streamed reply to one greedy chat message; ServeError if it is not whole."""
    body: dict[str, Any] = {
        "model": side.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "repeat_penalty": 1.0,
        "stream": True,
    }
    if side.name == OWN:
        # the peer has no such field; each of its pieces is a token
        body["stream_options"] = {"include_usage": True}
    reply = chat(side.address, json.dumps(body).encode(), TIMEOUT_SECONDS)
    if reply.fault:
        raise ServeError(f"{side.name} did not answer: {reply.fault}")
    return reply


def count(reply: Reply, limit: int) -> int:
    """Return how many tokens a reply has: as the server says, else its limit, or its pieces and the end."""
    if "completion_tokens" in reply.usage:
        return int(reply.usage["completion_tokens"])
    return limit if reply.finish == "length" else len(reply.pieces) + 1


def decode_rate(reply: Reply, limit: int) -> float | None:
    """Return tokens per second behind the first piece; None for a reply in one piece."""
    if len(reply.pieces) < 2 or reply.pieces[-1][0] <= reply.pieces[0][0]:
        return None
    return (count(reply, limit) - 1) / (reply.pieces[-1][0] - reply.pieces[0][0]) * 1000


def first_ms(side: Side, reply: Reply) -> float:
    """Return the time from the request to the first piece, in milliseconds; ServeError for an empty reply."""
    if reply.ttft_s is None:
        raise ServeError(f"{side.name} gave an empty reply")
    return 1000 * reply.ttft_s


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
