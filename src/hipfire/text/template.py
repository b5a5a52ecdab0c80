"""Chat templates: where a model's template comes from, and rendering messages with it.

Rendering equals that of transformers' `apply_chat_template` for the same messages, undefined names included:
they print as nothing, since published templates rely on it. This file knows the sandbox and the messages, not
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from hipfire.base.errors import ArtifactError, HipfireError, ValidationError
from hipfire.base.types import TextAssets
from hipfire.text.budget import Budget, Limits
from hipfire.text.messages import copy_json, normalize_messages, normalize_tools
from hipfire.text.origin import RenderedPrompt, join_text, mark, spans_of
from hipfire.text.sandbox import TemplateEnvironment

_MAX_SOURCE: Final = 1 << 17
_RESERVED: Final = frozenset(
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "range",
        "chat_template",
        "template",
    ]
)
CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CHATML_TOKENS: Final = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """A template's Jinja source and where it came from, in words for people."""

    source: str
    origin: str


class ChatTemplate:
    """A compiled chat template. Rendering shares nothing between calls, so one may be used from many threads.

    `source` is Jinja; `origin` names it in errors. `bos_token` and `eos_token` are what the template may
    print under those names; None leaves them undefined. Raises ArtifactError, naming the line, if it does not
    compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        origin: str = "chat template",
        limits: Limits | None = None,
    ) -> None:
        self.source = source
        self.origin = origin
        self._tokens = {
            name: token
            for name, token in (("bos_token", bos_token), ("eos_token", eos_token))
            if token is not None
        }
        self._limits = limits if limits is not None else Limits()
        if len(source) > _MAX_SOURCE:
            raise ArtifactError(f"the chat template has more than {_MAX_SOURCE} characters", path=origin)
        try:
            self._code = TemplateEnvironment(Budget(self._limits)).compile_source(source)
        except TemplateSyntaxError as error:
            raise ArtifactError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}", path=origin
            ) from error
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise ArtifactError(f"the chat template cannot be compiled: {error}", path=origin) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> RenderedPrompt:
        """Return the prompt for `messages` (messages.py says what is accepted); nothing passed in is changed.

        `extra` are further names for the template (`enable_thinking`, ...). `strftime_now` prints midnight of
        `today` (the current day by default), so that prompts of one day are equal and prefixes can be reused.
        Raises ValidationError for bad messages, for what the template refuses by raise_exception, and when it
        cannot handle them; ArtifactError when it breaks out of the sandbox or spends its budget.
        """
        names = {
            **mark(self._extra(extra)),
            **self._tokens,
            "messages": [
                {**mark(message), "role": message["role"]} for message in normalize_messages(messages)
            ],
            "tools": mark(normalize_tools(tools)),
            "documents": mark(copy_json((extra or {}).get("documents"), "documents")),
            "add_generation_prompt": add_generation_prompt,
        }
        budget = Budget(self._limits)
        environment = TemplateEnvironment(budget)
        moment = datetime.combine(today if today is not None else date.today(), time())
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: moment.strftime(form)
        try:
            template = Template.from_code(environment, self._code, environment.make_globals(None))
            pieces = []
            for piece in template.root_render_func(template.new_context(names)):
                budget.text(len(piece))
                pieces.append(piece)
            text = join_text(pieces)
        except HipfireError:
            raise
        except SecurityError as error:
            raise ArtifactError(f"the chat template breaks the rules: {error}", path=self.origin) from error
        except Exception as error:
            raise ValidationError(
                f"the chat template could not render these messages: {type(error).__name__}: {error}",
                hint=f"check the order and the fields of the messages, or do not use {self.origin}",
            ) from error
        return RenderedPrompt(str.__str__(text), spans_of(text))

    def check(self) -> tuple[str, ...]:
        """Render small conversations of every kind; return what fails, one line each, to report at load time.

        A refusal by the template's own raise_exception is its policy and is not reported.
        """
        failures = []
        for name, (messages, tools) in _samples().items():
            try:
                self.render(messages, tools=tools)
            except _RefusedError:
                continue
            except HipfireError as error:
                failures.append(f"{name}: {error.line()}")
        return tuple(failures)

    def _extra(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        copied: dict[str, Any] = copy_json(dict(extra or {}), "template arguments")
        taken = sorted(_RESERVED & copied.keys())
        if taken:
            raise ValidationError(
                f"the template argument {taken[0]!r} cannot be set by a request",
                hint="only names that the template itself offers, such as enable_thinking, can",
            )
        return copied


class _RefusedError(ValidationError):
    """The template itself refused the messages."""


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(
        f"the chat template refuses these messages: {message}",
        hint="change the roles or their order as it says",
    )


def choose_template(
    assets: TextAssets,
    *,
    override_file: Path | None = None,
    user_dir: Path | None = None,
    model_stem: str = "",
    name: str | None = None,
) -> TemplateChoice | None:
    """Return the template to use, or None when the model has none and raw completion is all that it can do.

    In this order: `override_file`; `<user_dir>/<model_stem>.j2`; the model's own (called `name`, else
    "default", else its first); ChatML where the vocabulary has its markers. Raises ValidationError for a file
    that cannot be read.
    """
    if override_file is not None:
        return TemplateChoice(_read(override_file), f"file {override_file}")
    if user_dir is not None and model_stem:
        own = user_dir / f"{model_stem}.j2"
        if own.is_file():
            return TemplateChoice(_read(own), f"user template {own}")
    templates = assets.chat_templates
    if templates:
        wanted = (name or "default", "default", *templates)
        key = next(key for key in wanted if key in templates)
        return TemplateChoice(templates[key], f"model file, template {key!r}")
    if all(_has_token(assets, token) for token in _CHATML_TOKENS):
        return TemplateChoice(CHATML, "built-in ChatML (the model has no template but the ChatML tokens)")
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(
            f"cannot read the chat template {path}: {error}", hint="name a UTF-8 file that exists"
        ) from error


def _has_token(assets: TextAssets, token: str) -> bool:
    if assets.tokenizer_json is not None:
        return json.dumps(token) in assets.tokenizer_json
    return token in (assets.gguf or {}).get("tokenizer.ggml.tokens", ())


def _samples() -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    user = {"role": "user", "content": "Hello"}
    call = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"at": "sky"}}}
    result = {"role": "tool", "content": "blue", "name": "look", "tool_call_id": "call00001"}
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a thing.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    thinking = {"role": "assistant", "content": "Hi", "reasoning_content": "A greeting."}
    return {
        "plain": ([user], None),
        "system": ([{"role": "system", "content": "Be brief."}, user], None),
        "reasoning": ([user, thinking, user], None),
        "tools": ([user], [tool]),
        "tool result": ([user, calling, result], [tool]),
    }
