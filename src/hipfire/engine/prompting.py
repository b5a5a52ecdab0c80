"""From what a client asks to what the engine runs: prompt tokens, sampling, channels, tools and format.

Everything that a request can get wrong is found here, before the turn waits for anything. This file knows
templates and settings; it runs no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from hipfire.base.errors import ContextLengthError, UnsupportedError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.borders import message_borders
from hipfire.engine.conversation import history, thinking_names, usable_tools, with_instruction
from hipfire.engine.grammar import Grammar, GrammarFactory
from hipfire.engine.llm import fit_to_context
from hipfire.engine.request import Request
from hipfire.engine.turn import ToolChoice, TurnRequest
from hipfire.runtime.load import LoadedModel
from hipfire.text.origin import RenderedPrompt
from hipfire.text.reply_format import ReplyFormat, close_text, reply_format, starts_closed, starts_in_thinking
from hipfire.text.template import ChatTemplate

PLAIN: Final = ReplyFormat(thinking="none", tools=None, markers=())
# the names by which generation_config.json calls what SamplingParams calls otherwise
_FILE_NAMES: Final = {"repeat_penalty": "repetition_penalty"}
# how much of a rendered prompt's end tells whether the reply begins inside of a thinking span
_TAIL: Final = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that can run.

    `budget` is the most tokens of the reply. `in_thinking` and `closed` say how the prompt ends. `close` are
    the tokens that end a thinking span, empty where nothing can; `cap` is the most tokens of one span, 0 for
    no bound. `tools` are those that the parser is told of, also where the template is not. `may_think`: the
    reply may open a thought by itself. `continues`: it goes on in the prompt's own text. `borders` are
    numbers of tokens of the prompt with which later ones are likely to begin; only models that keep a running
    state have any.
    """

    prompt: list[int]
    budget: int
    sampling: SamplingParams
    generation: GenerationParams
    format: ReplyFormat
    in_thinking: bool
    closed: bool
    close: tuple[int, ...]
    cap: int
    tools: tuple[Mapping[str, Any], ...]
    tool_choice: ToolChoice
    grammar: Grammar | None
    may_think: bool
    continues: bool
    warnings: tuple[str, ...]
    borders: tuple[int, ...] = ()


class Prompting:
    """Prepares the turns of one loaded model.

    `default_sampling` and `default_max_tokens` stand in for what neither a request nor the model's file says.
    `warnings` are about the file.
    """

    def __init__(
        self, loaded: LoadedModel, default_sampling: SamplingParams, default_max_tokens: int | None
    ) -> None:
        self._loaded = loaded
        self._default_max_tokens = default_max_tokens
        self._grammars: GrammarFactory | None = None
        self._formats: dict[str, ReplyFormat] = {}
        self.warnings: list[str] = []
        self._sampling = _file_sampling(default_sampling, loaded.assets.generation_config, self.warnings)

    def prepare(self, request: TurnRequest) -> Prepared:
        """Return the turn, ready to run.

        Raises ValidationError, ContextLengthError or UnsupportedError.
        """
        warnings: list[str] = []
        generation = request.generation
        fit = request.fit
        if generation.max_tokens is None and self._default_max_tokens is not None:
            limit = max(self._default_max_tokens, generation.min_tokens)
            generation = replace(generation, max_tokens=limit)
            fit = True
        if request.prompt is not None:
            self._refuse_endless(request.prompt)
            prompt, chat = self._loaded.tokenizer.encode(request.prompt), _Chat(PLAIN)
            _refuse_chat_fields(request)
        else:
            prompt, chat = self._chat(request, warnings)
        if fit:
            generation = fit_to_context(generation, len(prompt), self._loaded.max_seq)
        sampling = _chosen(request, self._sampling)
        checked = Request(tuple(prompt), sampling, generation)
        return Prepared(
            prompt=prompt,
            budget=checked.token_budget(self._loaded.max_seq, self._loaded.config.sizes.max_positions),
            sampling=sampling,
            generation=generation,
            format=chat.format,
            in_thinking=chat.in_thinking,
            closed=chat.closed,
            close=chat.close,
            cap=chat.cap,
            tools=chat.tools,
            tool_choice=request.tool_choice,
            grammar=self._grammar(request),
            may_think=request.thinking.enabled is not False and not chat.closed,
            continues=request.messages is None,
            warnings=tuple(warnings),
            borders=chat.borders,
        )

    def _chat(self, request: TurnRequest, warnings: list[str]) -> tuple[list[int], _Chat]:
        tools = usable_tools(request)
        shown = () if request.tool_choice.mode == "none" else tools
        template = self._template(shown)
        tokenizer = self._loaded.tokenizer
        fmt = self._format(template.source)
        if shown and fmt.tools is None:
            raise UnsupportedError(
                "the chat template of this model does not know tools",
                hint="leave tools out, or use a model that was trained to call them",
            )
        messages = list(request.messages or ())
        if fmt.thinking != "none":
            # a model that does not think may write about such markup too, and there it is the answer
            messages = history(messages)
        messages = with_instruction(messages, request.tool_choice)
        close = close_text(fmt)
        closing = tuple(tokenizer.encode(close, add_bos=False, parse_special=True)) if close else ()
        extra, cap = thinking_names(request, template.source, fmt, bool(closing), warnings)
        rendered = template.render(messages, tools=shown or None, extra=extra)
        self._refuse_endless(rendered.text)
        tail = rendered.text[-_TAIL:]
        in_thinking, closed = starts_in_thinking(tail, fmt), starts_closed(tail, fmt)
        if in_thinking and request.thinking.enabled is False and close:
            # this template opens a thought regardless
            rendered = RenderedPrompt(rendered.text + close, rendered.caller_spans)
            in_thinking, closed = False, True
        called = tools if fmt.tools is not None else ()
        prompt = tokenizer.encode_chat(rendered)
        borders: tuple[int, ...] = ()
        if self._loaded.runner.recurrent:
            borders = message_borders(
                template, messages, rendered, prompt, tokenizer, tools=shown or None, extra=extra
            )
        return prompt, _Chat(fmt, in_thinking, closed, closing, cap, called, borders)

    def _refuse_endless(self, text: str) -> None:
        """Refuse what cannot fit whatever its tokens are: cutting megabytes into tokens stalls all turns."""
        least = -(-len(text) // self._loaded.tokenizer.longest_token)
        if least > self._loaded.max_seq:
            raise ContextLengthError(least, self._loaded.max_seq, hint="shorten the prompt")

    def _format(self, source: str) -> ReplyFormat:
        if source not in self._formats:
            tokenizer = self._loaded.tokenizer
            self._formats[source] = reply_format(source, lambda text: tokenizer.token_id(text) is not None)
        return self._formats[source]

    def _template(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        templates = self._loaded.templates
        if templates is None:
            raise UnsupportedError(
                f"{self._loaded.path.name} has no chat template: it is a base model",
                hint="use /v1/completions with plain text, or set prompt.chat_template",
            )
        return templates.pick(tools)

    def _grammar(self, request: TurnRequest) -> Grammar | None:
        wanted = request.response_format
        if wanted.kind == "text":
            return None
        if request.tools and request.tool_choice.mode != "none":
            raise UnsupportedError(
                "a reply cannot both follow a response_format and call tools", hint="leave one of the two out"
            )
        if wanted.kind == "json_schema" and wanted.schema is None:
            raise ValidationError("response_format has no schema", hint="give json_schema.schema")
        if self._grammars is None:
            self._grammars = GrammarFactory(self._loaded.tokenizer, self._loaded.end_ids)
        return self._grammars.matcher(wanted.schema if wanted.kind == "json_schema" else None)


@dataclass(frozen=True, slots=True)
class _Chat:
    """What a conversation, unlike plain text, says about its reply."""

    format: ReplyFormat
    in_thinking: bool = False
    closed: bool = False
    close: tuple[int, ...] = ()
    cap: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    borders: tuple[int, ...] = ()


def _file_sampling(defaults: SamplingParams, file: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Return every knob's value where no request names it: the model file's own, else the default."""
    values = {each.name: getattr(defaults, each.name) for each in fields(SamplingParams)}
    for name in values:
        value = file.get(_FILE_NAMES.get(name, name))
        if value is None or name in ("seed", "logit_bias"):
            continue
        try:
            values[name] = getattr(SamplingParams(**{name: value}), name)
        except ValidationError as error:
            warnings.append(f"generation_config of the model is passed over: {error.line()}")
    if file.get("do_sample") is False and "temperature" not in file:
        values["temperature"] = 0.0
    return values


def _chosen(request: TurnRequest, fallback: Mapping[str, Any]) -> SamplingParams:
    if request.sampling_given is None:
        return request.sampling
    unknown = sorted(request.sampling_given - fallback.keys())
    if unknown:
        raise ValidationError(f"sampling has no field {unknown[0]!r}")
    chosen = {name: getattr(request.sampling, name) for name in request.sampling_given}
    return SamplingParams(**{**fallback, **chosen})


def _refuse_chat_fields(request: TurnRequest) -> None:
    """Plain text has no template that tools or thinking could be told to."""
    if request.tools or request.thinking.enabled is not None or request.thinking.effort is not None:
        raise ValidationError(
            "tools and thinking need a conversation", hint="use /v1/chat/completions with messages"
        )
