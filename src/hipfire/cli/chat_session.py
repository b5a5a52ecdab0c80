"""A conversation with a server: its messages, its slash commands, and what is kept of an interrupted turn.

This file asks the server and hands pieces to a view. It does not read the keyboard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hipfire.base import log
from hipfire.base.errors import HipfireError, ValidationError
from hipfire.cli.chat_view import View
from hipfire.cli.output import write
from hipfire.cli.remote import Remote, Reply
from hipfire.cli.reply_view import cached_tokens, summary
from hipfire.cli.signals import EndedBySignal

HELP = """\
/clear          forget the conversation; the system message stays
/system [TEXT]  set the system message, or show it
/stats          tokens and speed so far
/save FILE      write the conversation: JSON if FILE ends in .json, else Markdown
/help           this list
/exit, /quit    leave (also Ctrl-D)
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer; at the prompt, twice, it leaves."""


@dataclass
class Totals:
    """What the session has used so far: turns, tokens drawn, tokens read again from the cache."""

    turns: int = 0
    tokens: int = 0
    cached: int = 0
    context: int = 0
    last: str = ""

    def add(self, reply: Reply) -> None:
        """Count a finished reply."""
        self.turns += 1
        drawn = int(reply.usage.get("completion_tokens") or 0)
        self.tokens += drawn
        self.cached += cached_tokens(reply.usage)
        self.context = drawn + int(reply.usage.get("prompt_tokens") or 0)
        self.last = summary(reply)


@dataclass
class Session:
    """One conversation. `fields` go with every request; `make_view` gives each reply its view.

    `keeps_going` tells that Ctrl-C ends a turn and an error is a line; else both end the session.
    """

    remote: Remote
    model: str
    fields: Mapping[str, Any]
    make_view: Callable[[], View]
    prepare: Callable[[str], str] = str
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    keeps_going: bool = True

    def ask(self, text: str) -> None:
        """Send a turn and show the reply.

        What was shown is what is kept: of a reply that Ctrl-C ends its part so far, or no trace of the turn
        if nothing of the answer had come. A turn that fails leaves no trace; its error is raised.
        """
        user = {"role": "user", "content": self.prepare(text)}
        body = {"model": self.model, "messages": [*self._history(), user], **self.fields}
        view, reply, shown = self.make_view(), None, ""
        try:
            with self.remote.chat(body) as reply:
                for piece in reply:
                    if piece.channel == "reasoning":
                        view.reasoning(piece.text)
                    else:
                        shown += piece.text
                        view.answer(piece.text)
            view.close()
            self.totals.add(reply)
        except KeyboardInterrupt as stopped:
            view.close()
            if isinstance(stopped, EndedBySignal) or not self.keeps_going:
                raise
            log.logger().info("stopped")
            if reply is None or not shown:
                return
        except BaseException:
            view.close()
            raise
        self.messages += [user, _assistant(shown, reply.reasoning)]
        for line in reply.extra.get("config_warnings") or ():
            log.logger().warning(str(line))
        if reply.finish == "length":
            log.logger().info("the answer was cut off at its longest length: --max-tokens sets that")

    def carry_out(self, line: str) -> bool:
        """Carry out a slash command or send a turn; return whether the session goes on."""
        try:
            if line.startswith("/"):
                return self.command(line.strip())
            self.ask(line)
        except HipfireError as error:
            if not self.keeps_going:
                raise
            log.logger().error(error.line())
        except EndedBySignal:
            raise
        except KeyboardInterrupt:
            # it came in the moment before the turn was sent, or again while the turn was ended
            if not self.keeps_going:
                raise
            log.logger().info("stopped")
        return True

    def command(self, line: str) -> bool:
        """Carry out a slash command; return whether the session goes on."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit"):
            return False
        actions: Mapping[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/system": self._system,
            "/stats": self._stats,
            "/save": self._save,
            "/help": lambda _: write(HELP),
        }
        if name not in actions:
            raise ValidationError(f"there is no command {name}", hint="/help lists the commands")
        actions[name](rest)
        return True

    def _history(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def _clear(self, _: str) -> None:
        self.messages.clear()
        log.logger().info("the conversation is forgotten")

    def _system(self, text: str) -> None:
        if text:
            self.system = text
            log.logger().info("the system message is set; /clear forgets what was said under the old one")
        else:
            write(self.system or "no system message")

    def _stats(self, _: str) -> None:
        totals = self.totals
        write(f"{self.model} at {self.remote.address}")
        write(f"{totals.turns} turns, {totals.tokens} tokens drawn, {totals.cached} read from the cache")
        if totals.last:
            write(f"{totals.context} tokens in the context after the last turn {totals.last}")

    def _save(self, name: str) -> None:
        if not name:
            raise ValidationError("/save needs the name of a file", hint="such as /save talk.md")
        path = Path(name).expanduser()
        history = self._history()
        text = _as_json(self.model, history) if path.suffix == ".json" else _as_markdown(history)
        try:
            _write_new(path, text.encode())
        except FileExistsError:
            raise ValidationError(f"{path} exists already", hint="give another name") from None
        except (OSError, ValueError, RuntimeError) as error:
            raise ValidationError(f"{name} cannot be written: {error}", hint="give another name") from error
        log.logger().info(f"{len(history)} messages written to {path}")


def _assistant(text: str, reasoning: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    # templates that want the reasoning of earlier turns find it here
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist; one that cannot be written whole does not stay."""
    with path.open("xb") as file:
        try:
            file.write(data)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _as_json(model: str, messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"model": model, "messages": messages}, indent=2, ensure_ascii=False) + "\n"


def _as_markdown(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in messages)
