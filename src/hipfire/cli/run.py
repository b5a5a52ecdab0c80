"""`hipfire run`: answer one prompt, by a server that is up or by a model loaded here, and say how fast.

The answer goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hipfire.base import log
from hipfire.base.config import Config, Resolved, generation_defaults
from hipfire.base.config_keys import Value
from hipfire.base.errors import ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.checkpoint.library import open_library
from hipfire.cli.loading import load_llm
from hipfire.cli.output import write, write_json
from hipfire.cli.overrides import THINKING, ReplyFlags, model_settings, request_fields
from hipfire.cli.pull import installed
from hipfire.cli.remote_run import answer
from hipfire.cli.serving import find_server, served_name
from hipfire.cli.settings import WHOLE, load_settings
from hipfire.text.normalize import normalize_prompt

if TYPE_CHECKING:
    from hipfire.engine.llm import LLM, TextStream
    from hipfire.engine.request import Completion

DEFAULT_PROMPT = "Hello"
LOADING = ("device", "tp", "kv_cache", "kv_backend", "max_seq", "threads")


@dataclass(frozen=True)
class Overrides(ReplyFlags):
    """Settings for this run alone; the ones of this class are those that a model is loaded with."""

    device: str | None = None
    """What computes: auto, cpu, gpu, or a number as in gpu:1."""

    kv_mode: str | None = None
    """Cache of keys and values: auto, q8, bf16 or f32."""

    kv_backend: str | None = None
    """How a GPU gets memory for keys and values: auto, vmm or legacy."""

    tp: Annotated[int | None, WHOLE] = None
    """Devices that share the model, each with a part of every matrix."""

    max_seq: Annotated[int | None, WHOLE] = None
    """Context length in tokens."""

    threads: Annotated[int | None, WHOLE] = None
    """CPU threads."""


@dataclass(frozen=True)
class Routing:
    """Who answers, and what of a server's reply is shown."""

    local: Annotated[bool, Parameter(negative="")] = False
    """Load the model here although a server is up; so do the flags that it is loaded with."""

    reasoning: bool | None = None
    """Show a server's reasoning on stderr; by default only if that is a terminal."""


NO_OVERRIDES, USUAL = Overrides(), Routing()


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
    routing: Annotated[Routing, Parameter(name="*")] = USUAL,
) -> None:
    """Answer a prompt with a model, by the server if one is up.

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
    stops = _checked(config, given, seed, stop, raw=raw)
    text = prompt_text(prompt, stdin=stdin)
    library = open_library(config)
    found = None if routing.local or _stays_here(config, given) else find_server(config)
    served = None if found is None else served_name(found, library, model)
    if found is not None and served is not None:
        resolve = model_settings(config, given, library.find(served))
        body = {"model": served, **_body(resolve, text, raw=raw), **_given(seed=seed, stop=list(stops))}
        answer(found.remote, body, raw=raw, stream=stream, as_json=json, reasoning=routing.reasoning)
        return
    target = installed(library, model)
    resolve = model_settings(config, given, target)
    _refuse_thinking(resolve)
    llm, settings = _load(resolve, target.path, seed)
    reply = _start(llm, text, settings, stops, raw=raw)
    if json:
        write_json(_as_json(reply.finish()))
    else:
        _print(reply, stream=stream)


def prompt_text(words: Sequence[str], *, stdin: bool) -> str:
    """Return the prompt: the words, or standard input, or a greeting if there is neither."""
    if not stdin:
        return _utf8(lambda: " ".join(words) or DEFAULT_PROMPT, "the prompt")
    if words:
        raise ValidationError(
            "the prompt cannot be both words and standard input", hint="put a prompt with a lone - in quotes"
        )
    if sys.stdin is None:
        raise ValidationError("standard input is closed", hint="give the prompt as words")
    return _utf8(sys.stdin.read, "standard input")


def _utf8(read: Callable[[], str], what: str) -> str:
    try:
        text = read()
        # under some locales Python reads bytes that are no text as lone surrogates
        text.encode()
    except UnicodeError as error:
        raise ValidationError(f"{what} is not valid UTF-8 text", hint="convert it to UTF-8 first") from error
    return text


def _checked(
    config: Config, given: Mapping[str, Value], seed: int | None, stop: Sequence[str] | None, *, raw: bool
) -> tuple[str, ...]:
    """Return the stop strings; raise ValidationError for what is wrong with the flags of a run."""
    # a mistake on the command line is found before a model is fetched
    for name in given:
        config.resolve(name, cli=given)
    SamplingParams(seed=seed)
    if raw and given["prompt.system"]:
        raise ValidationError(
            "--system needs the chat template that --raw leaves out", hint="give one of them"
        )
    return GenerationParams(stop=tuple(stop or ())).stop


def _stays_here(config: Config, given: Mapping[str, Value]) -> bool:
    """Return whether no server is to be asked: by the setting, or as its model is loaded otherwise."""
    return bool(config.resolve("serve.local").value) or any(given[name] is not None for name in LOADING)


def _body(resolve: Callable[..., Resolved], text: str, *, raw: bool) -> dict[str, Any]:
    """Return the fields of a request to a server: the prompt, and what somebody chose."""
    fields = request_fields(resolve, thinking=not raw)
    if raw:
        return {"prompt": text, **fields}
    system = resolve("prompt.system").value
    return {
        "messages": _messages(text, str(system), normalize=bool(resolve("prompt.normalize").value)),
        **fields,
    }


def _messages(text: str, system: str, *, normalize: bool) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": normalize_prompt(text) if normalize else text}]
    return [{"role": "system", "content": system}, *messages] if system else messages


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, [])}


def _refuse_thinking(resolve: Callable[..., Resolved]) -> None:
    """Say that a model loaded here is not told how to think: an error for flags, a warning for settings."""
    chosen = [found for found in map(resolve, THINKING) if found.winner.origin != "default"]
    if any(found.winner.origin == "cli" for found in chosen):
        raise ValidationError("flags about thinking need a server", hint="start one with `hipfire serve -d`")
    for found in chosen:
        log.logger().warning(f"{found.key.name} applies to replies of a server only")


def _load(resolve: Callable[..., Resolved], path: Path, seed: int | None) -> tuple[LLM, Settings]:
    # everything that can be wrong with the settings is found before seconds are spent on torch and weights
    _settings(resolve, {}, seed)
    llm = load_llm(path, lambda name: resolve(name).value)
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
    messages = _messages(text, settings.system, normalize=settings.normalize)
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
