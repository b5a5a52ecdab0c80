"""The offline Python API: load a model, continue text, hold a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, overload

from hipfire.base.errors import HipfireError, UnsupportedError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.checkpoint.library import find_model
from hipfire.engine.generate import Generation
from hipfire.engine.request import Completion, Request
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model

GREEDY = SamplingParams(temperature=0.0)


class TextStream:
    """The pieces of one reply as they come; `completion` is there once the iteration has ended."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pieces = iter(generation)
        self._failure: HipfireError | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except HipfireError as error:
            self._failure = error
            raise

    @property
    def completion(self) -> Completion | None:
        """Return the finished reply, or None while it is running."""
        return self._generation.completion

    def close(self) -> None:
        """End the stream early; it then has no completion."""
        self._pieces.close()

    def finish(self) -> Completion:
        """Run to the end, dropping the remaining pieces, and return the reply.

        Raises what ended the stream early, also if that was raised before.
        """
        for _ in self:
            pass
        completion = self._generation.completion
        if completion is None:
            raise self._failure or ValidationError("this stream was interrupted", hint="start a new one")
        return completion


class LLM:
    """A loaded model.

    `model` is a path (container, GGUF file, safetensors folder) or a tag that `hipfire pull` installed.
    Without `sampling` replies are greedy, hence reproducible. One stream runs at a time: starting another
    ends the first. On a machine's first run kernels are compiled while it loads, which takes half a minute;
    `compiling` is told how many of how many are done, and `reading` how many bytes of how many have gone to
    a GPU. Raises a HipfireError with a hint if it cannot load.

        llm = LLM("smollm2:135m")
        print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
    """

    def __init__(
        self,
        model: str | Path,
        options: LoadOptions | None = None,
        *,
        compiling: Callable[[int, int], None] | None = None,
        reading: Callable[[int, int], None] | None = None,
    ) -> None:
        self._loaded = load_model(find_model(str(model)), options, compiling=compiling, reading=reading)

    def close(self) -> None:
        """Give the memory of a GPU back; the model cannot be used any more. Nothing happens on the CPU."""
        self._loaded.close()

    @property
    def loaded(self) -> LoadedModel:
        """Return the loaded model with its tokenizer, template and runner."""
        return self._loaded

    @overload
    def generate(
        self, prompt: str, sampling: SamplingParams | None = ..., generation: GenerationParams | None = ...
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        sampling: SamplingParams | None = ...,
        generation: GenerationParams | None = ...,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        sampling: SamplingParams | None = None,
        generation: GenerationParams | None = None,
    ) -> Completion | list[Completion]:
        """Continue one text, or each of several; every prompt is checked before the first one runs."""
        if not isinstance(prompt, (list, tuple)):
            return self.stream(prompt, sampling, generation).finish()
        streams = [self.stream(text, sampling, generation) for text in prompt]
        return [stream.finish() for stream in streams]

    def stream(
        self,
        prompt: str,
        sampling: SamplingParams | None = None,
        generation: GenerationParams | None = None,
        *,
        fit: bool = False,
    ) -> TextStream:
        """Continue one text, piece by piece; `fit` cuts max_tokens to what the context holds."""
        if not isinstance(prompt, str):
            raise ValidationError(f"a prompt is text, not {type(prompt).__name__}", hint="give a str")
        return self._start(
            self._loaded.tokenizer.encode(prompt), sampling, generation, continues=True, fit=fit
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        generation: GenerationParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Answer a conversation of {"role", "content"} messages through the model's chat template."""
        return self.stream_chat(messages, sampling, generation, tools=tools).finish()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        generation: GenerationParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        fit: bool = False,
    ) -> TextStream:
        """Answer a conversation, piece by piece; `fit` cuts max_tokens to what the context holds."""
        tokens = self.encode_chat(messages, tools=tools)
        return self._start(tokens, sampling, generation, continues=False, fit=fit)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, the assistant's turn opened."""
        templates = self._loaded.templates
        if templates is None:
            raise UnsupportedError(
                f"{self._loaded.path.name} has no chat template: it is a base model",
                hint="use generate() with plain text, or set prompt.chat_template",
            )
        rendered = templates.pick(tools).render(messages, tools=tools)
        return self._loaded.tokenizer.encode_chat(rendered)

    def _start(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams | None,
        generation: GenerationParams | None,
        *,
        continues: bool,
        fit: bool,
    ) -> TextStream:
        _check(sampling, SamplingParams, "sampling")
        _check(generation, GenerationParams, "generation")
        generation = generation or GenerationParams()
        if fit:
            generation = fit_to_context(generation, len(tokens), self._loaded.max_seq)
        request = Request(tuple(tokens), sampling or GREEDY, generation)
        return TextStream(Generation(self._loaded, request, continues=continues))


def fit_to_context(generation: GenerationParams, prompt_tokens: int, max_seq: int) -> GenerationParams:
    """Return `generation` with max_tokens cut to what the context still holds, for limits nobody chose."""
    room = max(1, max_seq - prompt_tokens)
    if generation.max_tokens is None or generation.max_tokens <= room:
        return generation
    return replace(generation, max_tokens=room, min_tokens=min(generation.min_tokens, room))


def _check(value: object, kind: type, name: str) -> None:
    if value is not None and not isinstance(value, kind):
        given = type(value).__name__
        raise ValidationError(f"{name} is a {given}, not {kind.__name__}", hint="check the arguments' order")
