"""What is shown beside an answer that a server gives: its reasoning, dimmed, and its figures in one line.

Everything here goes to stderr. This file does not know how the answer itself is shown.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from hipfire.cli.progress import is_live
from hipfire.cli.remote import Reply

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class ReasoningView:
    """Shows reasoning on stderr, dimmed on a terminal; `shown` False hides it."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr is not None
        self._live = is_live()
        self._open = False

    def push(self, text: str) -> None:
        """Show more of it."""
        if self._shown:
            self._write(f"{'' if self._open else self._mark(DIM)}{text}")
            self._open = True

    def close(self) -> None:
        """End it, if any was shown: what comes next starts on a line of its own."""
        if self._open:
            self._open = False
            self._write(f"{self._mark(PLAIN)}\n")

    def _mark(self, code: str) -> str:
        return code if self._live else ""

    def _write(self, text: str) -> None:
        # an answer is worth having also where nobody can read how it came about
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def summary(reply: Reply, *more: str) -> str:
    """Return a reply's figures in brackets; what the server did not say is left out."""
    usage, timings = reply.usage, reply.timings
    parts = [f"{usage.get('completion_tokens', '?')} tok"]
    if rate := timings.get("decode_tok_s"):
        parts[0] += f", {rate:.1f} tok/s"
    prompt = f"prompt {usage.get('prompt_tokens', '?')} tok"
    if cached := cached_tokens(usage):
        prompt += f", {cached} cached"
    return f"[{'; '.join([*parts, prompt, str(reply.finish), *more])}]"


def cached_tokens(usage: Mapping[str, Any]) -> int:
    """Return how many tokens of the prompt were not computed again."""
    details = usage.get("prompt_tokens_details")
    return int(details.get("cached_tokens") or 0) if isinstance(details, Mapping) else 0
