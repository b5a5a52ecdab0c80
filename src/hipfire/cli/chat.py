"""`hipfire chat`: talk with a model in a terminal, by a server that is started if none is up.

Answers go to stdout; prompts, reasoning and notices to stderr. This file reads the keyboard and decides what
Ctrl-C means; what a turn is, is in chat_session.py.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from hipfire.base import env, log
from hipfire.base.config import Config
from hipfire.base.errors import ValidationError
from hipfire.checkpoint.library import Library, open_library
from hipfire.cli.chat_session import Session
from hipfire.cli.chat_view import make_view
from hipfire.cli.overrides import ReplyFlags, model_settings, request_fields
from hipfire.cli.progress import is_live
from hipfire.cli.pull import installed
from hipfire.cli.serve import start_detached
from hipfire.cli.serve_options import ServeFlags, own_word
from hipfire.cli.serve_words import Target
from hipfire.cli.serving import Found, configured_address, connect, find_server, served_name
from hipfire.cli.settings import load_settings
from hipfire.cli.signals import EndedBySignal
from hipfire.text.normalize import normalize_prompt

PROMPT, MORE = "you> ", "...> "
HISTORY_LINES = 1000
NO_FLAGS = ReplyFlags()


def chat(
    model: str | None = None,
    /,
    *,
    flags: Annotated[ReplyFlags, Parameter(name="*")] = NO_FLAGS,
    device: str | None = None,
    reasoning: bool | None = None,
    color: bool = True,
) -> None:
    """Talk with a model. /help lists what can be typed besides messages.

    A server is started in the background if none is up, and stays.

    Parameters
    ----------
    model
        Tag or installed name; without it the model that the server has loaded, else serve.default_model, else
        the only one that is installed.
    device
        What computes if a server has to be started: auto, cpu, gpu, or a number as in gpu:1.
    reasoning
        Show reasoning on stderr; by default only if that is a terminal.
    color
        --no-color shows plain text instead of drawn Markdown.
    """
    config, given = load_settings(), flags.values()
    serving = ServeFlags(device=device)
    # a mistake on the command line is found before a server is started
    for values in (given, serving.values()):
        for name in values:
            config.resolve(name, cli=values)
    library = open_library(config)
    found = find_server(config)
    if found is not None and device is not None:
        raise ValidationError(
            f"a server is up at {found.remote.address} and computes where it was told to",
            hint=f"`hipfire restart --device {device}` replaces it",
        )
    name = model or _usual_model(config, library, found)
    if found is None:
        found = _started(config, library, name, serving)
    served = served_name(found, library, name)
    if served is None:
        raise ValidationError(
            f"the server does not offer {name}", hint="`hipfire serve` with its path serves any file"
        )
    resolve = model_settings(config, given, library.find(served))
    session = Session(
        found.remote,
        served,
        request_fields(resolve),
        lambda: make_view(reasoning=is_live() if reasoning is None else reasoning, color=color),
        prepare=normalize_prompt if resolve("prompt.normalize").value else str,
        system=str(resolve("prompt.system").value),
    )
    keyboard = Keyboard(env.chat_history_path())
    session.keeps_going = keyboard.interactive
    talk(session, keyboard)


def talk(session: Session, keyboard: Keyboard) -> None:
    """Read lines and carry them out until the input ends, `/exit`, or Ctrl-C twice at the prompt.

    On a terminal an error ends the turn only; in a script it ends the session.
    """
    if keyboard.interactive:
        log.logger().info(f"{session.model} at {session.remote.address}; /help lists commands")
    warned = False
    while True:
        try:
            line = keyboard.read()
        except EndedBySignal:
            raise
        except KeyboardInterrupt:
            if warned or not keyboard.interactive:
                raise
            warned = True
            keyboard.new_line()
            log.logger().info("press Ctrl-C again to leave, or type /exit")
            continue
        warned = False
        if line is None:
            keyboard.new_line()
            return
        if line.strip() and not session.carry_out(line):
            return


class Keyboard:
    """Lines from standard input, with editing and a history of earlier ones where it is a terminal."""

    def __init__(self, history: Path) -> None:
        if sys.stdin is None:
            raise ValidationError("standard input is closed", hint="chat reads your messages from it")
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._readline: Any = None
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: PLC0415 - not every system has it, and it changes input() at once

                self._readline = readline
        self._history = history
        if self._readline is not None:
            with contextlib.suppress(OSError):
                self._readline.read_history_file(str(history))

    def read(self) -> str | None:
        """Return the next message, or None at the end; a line with a backslash last goes on in the next."""
        parts: list[str] = []
        while True:
            line = self._line(MORE if parts else PROMPT)
            if line is None:
                return "\n".join(parts) if parts else None
            parts.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                self._remember()
                return "\n".join(parts)

    def new_line(self) -> None:
        """Leave the line that the prompt is on."""
        if self.interactive:
            sys.stderr.write("\n")

    def _line(self, prompt: str) -> str | None:
        try:
            if self.interactive:
                return input(prompt)
            line = sys.stdin.readline()
            # under some locales Python reads bytes that are no text as lone surrogates
            line.encode()
        except EOFError:
            return None
        except UnicodeError as error:
            raise ValidationError(
                "standard input is not valid UTF-8 text", hint="convert it to UTF-8 first"
            ) from error
        return line.removesuffix("\n") if line else None

    def _remember(self) -> None:
        if self._readline is None:
            return
        # a history that cannot be kept is no reason to end a conversation
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            self._readline.set_history_length(HISTORY_LINES)
            self._readline.write_history_file(str(self._history))


def _usual_model(config: Config, library: Library, found: Found | None) -> str:
    """Return the model to talk with when none is named."""
    if found is not None and (loaded := found.health.model or found.health.loading):
        return loaded
    usual = str(config.resolve("serve.default_model").value)
    if usual:
        return usual
    models = found.remote.models() if found is not None else [local.name for local in library.scan()]
    if len(models) == 1:
        return models[0]
    hint = f"such as {', '.join(models[:3])}" if models else "`hipfire pull smollm2:135m` fetches a small one"
    raise ValidationError("say which model to talk with", hint=hint)


def _started(config: Config, library: Library, name: str, flags: ServeFlags) -> Found:
    """Start a server in the background and return it; what is missing is fetched first."""
    target = Target(own_word(library, installed(library, name)), configured_address(config))
    health = start_detached(target, flags)
    return Found(connect(config, target.address), health)
