"""Answering the prompt of `hipfire run` by a server that is up, so that no second copy of a model is loaded.

The answer goes to stdout. Reasoning goes to stderr or nowhere: never into the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hipfire.base import log
from hipfire.base.errors import HipfireError
from hipfire.cli.output import write, write_json
from hipfire.cli.progress import is_live
from hipfire.cli.remote import Remote, Reply
from hipfire.cli.reply_view import ReasoningView, cached_tokens, summary


def answer(
    remote: Remote,
    body: Mapping[str, Any],
    *,
    raw: bool,
    stream: bool = True,
    as_json: bool = False,
    reasoning: bool | None = None,
) -> None:
    """Send one request and print its reply; `raw` bodies have a prompt instead of messages.

    `reasoning` None shows it where stderr is a terminal. Ctrl-C closes the connection, which ends the work.
    """
    with remote.complete(body) if raw else remote.chat(body) as reply:
        if as_json:
            for _ in reply:
                pass
            write_json(_as_json(reply, remote))
        else:
            _print(reply, stream=stream, reasoning=is_live() if reasoning is None else reasoning)
    for line in reply.extra.get("config_warnings") or ():
        log.logger().warning(str(line))
    if not as_json:
        log.logger().info(summary(reply, f"via {remote.address}"))


def _print(reply: Reply, *, stream: bool, reasoning: bool) -> None:
    view, started = ReasoningView(shown=reasoning), False
    try:
        for piece in reply:
            if piece.channel == "reasoning":
                view.push(piece.text)
                continue
            view.close()
            if stream:
                # Ctrl-C may come as soon as the text is out
                started = True
                write(piece.text, end="", flush=True)
    except (KeyboardInterrupt, HipfireError):
        view.close()
        if started:
            # what comes next belongs on a line of its own
            write()
        raise
    view.close()
    write("" if stream else reply.answer)


def _as_json(reply: Reply, remote: Remote) -> dict[str, Any]:
    prefill = reply.timings.get("prefill_ms")
    return {
        "content": reply.answer,
        "reasoning": reply.reasoning,
        "tokens": reply.usage.get("completion_tokens"),
        "prompt_tokens": reply.usage.get("prompt_tokens"),
        "cached_tokens": cached_tokens(reply.usage),
        "tok_s": reply.timings.get("decode_tok_s"),
        "prefill_s": None if prefill is None else round(prefill / 1000, 4),
        "finish_reason": reply.finish,
        "seed": reply.extra.get("seed"),
        "server": str(remote.address),
    }
