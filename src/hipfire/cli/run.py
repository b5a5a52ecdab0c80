"""`hipfire run`: load a model, answer one prompt, and say how fast.

The answer goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hipfire.base import log
from hipfire.base.config import Config, Resolved, generation_defaults
from hipfire.base.config_keys import Value
from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.checkpoint.library import Library, LocalModel, open_library
from hipfire.cli.loading import load_llm
from hipfire.cli.output import write, write_json
from hipfire.cli.progress import make_progress
from hipfire.cli.pull import fetch_card
from hipfire.cli.settings import WHOLE, load_settings
from hipfire.cli.support import is_runnable, needs_later_version
from hipfire.text.normalize import normalize_prompt

if TYPE_CHECKING:
    from hipfire.engine.llm import LLM, TextStream
    from hipfire.engine.request import Completion

DEFAULT_PROMPT = "Hello"


@dataclass(frozen=True)
class Overrides:
    """Settings for this run alone; None leaves a setting to the files, the registry card and the model."""

    temp: Annotated[float | None, Parameter(name=["--temp", "-t"])] = None
    """0 to 2; 0 always takes the most likely token."""

    top_p: float | None = None
    """Keep the smallest set of tokens with this probability."""

    top_k: Annotated[int | None, WHOLE] = None
    """Keep this many of the most likely tokens."""

    min_p: float | None = None
    """Drop tokens below this share of the best token's probability."""

    repeat_penalty: float | None = None
    """Divides the score of tokens seen before; 1 is off."""

    presence_penalty: float | None = None
    """Subtracted once from the score of tokens seen before."""

    frequency_penalty: float | None = None
    """Subtracted from a token's score for each time it was seen."""

    max_tokens: Annotated[int | None, WHOLE, Parameter(name=["--max-tokens", "-n"])] = None
    """Longest reply, in tokens."""

    system: str | None = None
    """System message."""

    kv_mode: str | None = None
    """Cache of keys and values: auto, q8, bf16 or f32."""

    max_seq: Annotated[int | None, WHOLE] = None
    """Context length in tokens."""

    threads: Annotated[int | None, WHOLE] = None
    """CPU threads."""

    def values(self) -> dict[str, Value]:
        """Return the values by setting; the flags' own names are those of the settings, but for three."""
        renamed = {"temp": "temperature", "system": "prompt.system", "kv_mode": "kv_cache"}
        return {renamed.get(name, name): value for name, value in vars(self).items()}


NO_OVERRIDES = Overrides()


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective settings of one run; `chosen_length` tells that somebody asked for `max_tokens`."""

    sampling: SamplingParams
    max_tokens: int
    chosen_length: bool
    system: str
    normalize: bool


def run(
    model: str,
    /,
    *prompt: str,
    overrides: Annotated[Overrides, Parameter(name="*")] = NO_OVERRIDES,
    seed: Annotated[int | None, WHOLE] = None,
    stop: Annotated[list[str] | None, Parameter(negative="")] = None,
    raw: Annotated[bool, Parameter(negative="")] = False,
    stream: bool = True,
    json: Annotated[bool, Parameter(name=["--json", "-j"], negative="")] = False,
    stdin: Annotated[bool, Parameter(name=["--stdin", "-"], negative="")] = False,
) -> None:
    """Answer a prompt with a model.

    A registered model that is not installed is fetched first. Backslashes in the prompt stay as they are.

    Parameters
    ----------
    model
        Tag, installed name or path of a model.
    prompt
        Words of the prompt, joined by spaces.
    seed
        Repeats a draw; the seed of every run is in its --json output.
    stop
        Text that ends the reply; may be given several times.
    raw
        Continue the prompt's text without the chat template.
    stream
        Print pieces as they come; --no-stream prints the whole reply at the end.
    json
        Print one JSON object instead of the text.
    stdin
        Read the prompt from standard input.
    """
    config, given = load_settings(), overrides.values()
    # a mistake on the command line is found before a model is fetched
    for name in given:
        config.resolve(name, cli=given)
    SamplingParams(seed=seed)
    stops = GenerationParams(stop=tuple(stop or ())).stop
    if raw and overrides.system:
        raise ValidationError(
            "--system needs the chat template that --raw leaves out", hint="give one of them"
        )
    text = prompt_text(prompt, stdin=stdin)
    local = _installed(open_library(config), model)
    llm, settings = _load(config, local, given, seed)
    reply = _start(llm, text, settings, stops, raw=raw)
    if json:
        write_json(_as_json(reply.finish()))
    else:
        _print(reply, stream=stream)


def prompt_text(words: Sequence[str], *, stdin: bool) -> str:
    """Return the prompt: the words, or standard input, or a greeting if there is neither."""
    if not stdin:
        return " ".join(words) or DEFAULT_PROMPT
    if words:
        raise ValidationError(
            "the prompt cannot be both words and standard input", hint="put a prompt with a lone - in quotes"
        )
    if sys.stdin is None:
        raise ValidationError("standard input is closed", hint="give the prompt as words")
    try:
        text = sys.stdin.read()
        # under some locales Python reads bytes that are no text as lone surrogates
        text.encode()
    except UnicodeError as error:
        raise ValidationError(
            "standard input is not valid UTF-8 text", hint="convert it to UTF-8 first"
        ) from error
    return text


def _installed(library: Library, name: str) -> LocalModel:
    local = library.find(name)
    if local is not None:
        return local
    card = library.registry.require(name)
    if not is_runnable(card):
        raise UnsupportedError(needs_later_version(card), hint="`hipfire list -r` shows what this one runs")
    if card.terms:
        log.logger().info(f"{card.tag}: {card.terms}")
    fetch_card(card, library.models_dir, make_progress())
    return library.require(name)


def _load(
    config: Config, local: LocalModel, given: Mapping[str, Value], seed: int | None
) -> tuple[LLM, Settings]:
    card = local.card.settings() if local.card is not None else {}

    def resolve(name: str, model_file: Mapping[str, Value] | None = None) -> Resolved:
        return config.resolve(name, cli=given, model=local.settings_name, card=card, model_file=model_file)

    # everything that can be wrong with the settings is found before seconds are spent on torch and weights
    _settings(resolve, {}, seed)
    llm = load_llm(local.path, lambda name: resolve(name).value)
    loaded, sizes = llm.loaded, llm.loaded.config.sizes
    family = loaded.config.to_hf()["model_type"]
    log.logger().info(f"[{family}] {sizes.hidden}d {sizes.layers}L {sizes.vocab_size} vocab")
    if loaded.unknown_tensors:
        listed = ", ".join(loaded.unknown_tensors[:3])
        log.logger().warning(f"{len(loaded.unknown_tensors)} tensors of the file are not used: {listed}")
    for fault in loaded.templates.faults() if loaded.templates is not None else ():
        log.logger().warning(f"the chat template cannot render every conversation: {fault}")
    return llm, _settings(resolve, generation_defaults(loaded.assets.generation_config), seed)


def _settings(resolve: Any, model_file: Mapping[str, Value], seed: int | None) -> Settings:
    def value(name: str) -> Any:
        return resolve(name, model_file).value

    length = resolve("generation.max_tokens", model_file)
    return Settings(
        sampling=SamplingParams(
            temperature=value("generation.temperature"),
            top_k=value("generation.top_k"),
            top_p=value("generation.top_p"),
            min_p=value("generation.min_p"),
            repeat_penalty=value("generation.repeat_penalty"),
            presence_penalty=value("generation.presence_penalty"),
            frequency_penalty=value("generation.frequency_penalty"),
            seed=seed,
        ),
        max_tokens=length.value,
        chosen_length=length.winner.origin != "default",
        system=value("prompt.system"),
        normalize=value("prompt.normalize"),
    )


def _start(llm: LLM, text: str, settings: Settings, stops: tuple[str, ...], *, raw: bool) -> TextStream:
    generation = GenerationParams(max_tokens=settings.max_tokens, stop=stops)
    # a length that nobody asked for must not make a long prompt fail
    fit = not settings.chosen_length
    if not raw and llm.loaded.templates is None:
        log.logger().info("a base model without a chat template: it continues the prompt's text")
        if settings.system:
            log.logger().warning("the system message is left out: it needs a chat template")
        raw = True
    if raw:
        return llm.stream(text, settings.sampling, generation, fit=fit)
    messages = [{"role": "user", "content": normalize_prompt(text) if settings.normalize else text}]
    if settings.system:
        messages.insert(0, {"role": "system", "content": settings.system})
    return llm.stream_chat(messages, settings.sampling, generation, fit=fit)


def _print(reply: TextStream, *, stream: bool) -> None:
    if stream:
        try:
            for piece in reply:
                write(piece, end="", flush=True)
        except KeyboardInterrupt:
            # what comes next belongs on a line of its own
            write()
            raise
        write()
    completion = reply.finish()
    if not stream:
        write(completion.text)
    timings = completion.timings
    log.logger().info(
        f"[{len(completion.tokens)} tok, {timings.tokens_per_second:.1f} tok/s; "
        f"prompt {completion.prompt_tokens} tok in {timings.prefill:.2f} s; {completion.finish_reason}]"
    )


def _as_json(completion: Completion) -> dict[str, Any]:
    return {
        "content": completion.text,
        "tokens": len(completion.tokens),
        "prompt_tokens": completion.prompt_tokens,
        "tok_s": round(completion.timings.tokens_per_second, 2),
        "prefill_s": round(completion.timings.prefill, 4),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
    }
