"""How `hipfire chat` shows a reply: as Markdown on a terminal, as plain text everywhere else.

A view gets the pieces of one reply as they come. It knows no server and keeps no conversation.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from hipfire.cli.output import write
from hipfire.cli.reply_view import ReasoningView

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

REFRESHES = 10
FENCE = re.compile(r" {0,3}(`{3,}(?!.*`)|~{3,})(.*)")
# what could move the cursor or change the terminal; line breaks and tabs are layout
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class View(Protocol):
    """Shows one reply."""

    def answer(self, text: str) -> None:
        """Show more of the answer."""

    def reasoning(self, text: str) -> None:
        """Show more of the reasoning."""

    def close(self) -> None:
        """Show what is still held back, and go to the start of a line."""


class PlainView:
    """Writes the answer to stdout as it is."""

    def __init__(self, *, reasoning: bool) -> None:
        self._thoughts = ReasoningView(shown=reasoning)
        self._column = 0

    def answer(self, text: str) -> None:
        """Write more of the answer."""
        self._thoughts.close()
        write(text, end="", flush=True)
        self._column = 0 if text.endswith("\n") else 1

    def reasoning(self, text: str) -> None:
        """Write more of the reasoning to stderr, if it is shown."""
        self._thoughts.push(text)

    def close(self) -> None:
        """End the line."""
        self._thoughts.close()
        if self._column:
            write(flush=True)
            self._column = 0


class MarkdownView:
    """Draws the answer on a terminal; complete blocks stay, the last one is drawn again and again."""

    def __init__(self, console: Console, *, reasoning: bool) -> None:
        self._console = console
        self._thoughts = ReasoningView(shown=reasoning)
        self._pending = ""
        self._live: Live | None = None
        self._drawn = False

    def answer(self, text: str) -> None:
        """Draw more of the answer."""
        self._thoughts.close()
        done, self._pending = split_blocks(self._pending + visible(text))
        if self._live is None:
            # rich takes longer to import than a local command takes to run
            from rich.live import Live  # noqa: PLC0415

            self._live = Live(
                console=self._console,
                get_renderable=lambda: Tail(self._pending),
                refresh_per_second=REFRESHES,
                transient=True,
            )
            self._live.start()
        if done:
            # else what is drawn for good would stand above an older state of what follows it
            self._live.refresh()
            self._draw(done)

    def reasoning(self, text: str) -> None:
        """Write more of the reasoning to stderr, if it is shown, where no answer has begun yet."""
        if self._live is None:
            self._thoughts.push(visible(text))

    def close(self) -> None:
        """Draw the last block for good."""
        self._thoughts.close()
        if self._live is not None:
            self._live.stop()
            self._live = None
        rest, self._pending = self._pending, ""
        if rest.strip():
            self._draw(rest)

    def _draw(self, text: str) -> None:
        from rich.markdown import Markdown  # noqa: PLC0415 - see answer

        if self._drawn:
            self._console.print()
        self._drawn = True
        self._console.print(Markdown(text, hyperlinks=False))


class Tail:
    """The last lines of a Markdown text, as many as the terminal is high."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines that fit."""
        from rich.markdown import Markdown  # noqa: PLC0415 - see MarkdownView.answer
        from rich.segment import Segment  # noqa: PLC0415 - see MarkdownView.answer

        lines = console.render_lines(Markdown(self._text, hyperlinks=False), options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def make_view(*, reasoning: bool, color: bool = True) -> View:
    """Return the view that suits stdout; `color` False asks for plain text."""
    if not color or not draws(os.environ):
        return PlainView(reasoning=reasoning)
    from rich.console import Console  # noqa: PLC0415 - see MarkdownView.answer

    return MarkdownView(Console(highlight=False), reasoning=reasoning)


def draws(environment: Mapping[str, str]) -> bool:
    """Return whether stdout is a terminal that may be drawn on."""
    plain = environment.get("NO_COLOR") or environment.get("CLICOLOR") == "0"
    return not plain and environment.get("TERM") != "dumb" and sys.stdout.isatty()


def split_blocks(text: str) -> tuple[str, str]:
    """Return the part of a Markdown text that no more text can change, and the rest.

    A block ends where an empty line, outside of fenced code, is followed by a line that is not indented: an
    indented one still belongs to a list.
    """
    fence = ""
    cut = position = 0
    blank = False
    for line in text.splitlines(keepends=True):
        if blank and not fence and not line[0].isspace():
            cut = position
        found = FENCE.match(line)
        # an opening line may name a language, a closing one holds nothing else
        if found is not None and not fence:
            fence = found[1]
        elif found is not None and found[1].startswith(fence) and not found[2].strip():
            fence = ""
        blank = not line.strip()
        position += len(line)
    return text[:cut], text[cut:]


def visible(text: str) -> str:
    """Return `text` with control characters shown as escapes."""
    return text.translate(CONTROLS)
