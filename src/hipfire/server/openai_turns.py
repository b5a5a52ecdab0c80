"""What both generating routes of OpenAI's API share: read a request, run its turns, tell them.

How a route words its replies is its `ReplyWriter`'s business.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from starlette.requests import Request

from hipfire.engine.turn import Delta, TurnKey
from hipfire.server import openai_replies as replies
from hipfire.server.choices import Choices
from hipfire.server.limits import read_json
from hipfire.server.openai_replies import Envelope, Said
from hipfire.server.openai_types import OpenAIRequest
from hipfire.server.reply import Reply
from hipfire.server.service import Service
from hipfire.server.sse import DONE, Frames, Last, TurnResponse, data_frame, to_json

Reader = Callable[[Mapping[str, Any], TurnKey], OpenAIRequest]


class ReplyWriter(ABC):
    """Words the choices of one request; each method returns entries of `choices`."""

    id_prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, asked: OpenAIRequest) -> None:
        self.asked = asked

    @abstractmethod
    def first(self) -> list[dict[str, Any]]:
        """Return what begins the choices of a stream."""

    @abstractmethod
    def delta(self, index: int, event: Delta) -> dict[str, Any]:
        """Return a piece of a choice."""

    @abstractmethod
    def last(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        """Return what ends a choice; the last entry says how it finished."""

    @abstractmethod
    def choice(self, index: int, reply: Reply, said: Said) -> dict[str, Any]:
        """Return a whole choice."""


async def respond(
    service: Service, request: Request, read: Reader, writer_type: type[ReplyWriter]
) -> TurnResponse:
    """Read a request and return the response that runs its turns; raises HipfireErrors."""
    options = service.options
    body = await read_json(request, max_bytes=options.max_request_bytes, timeout_s=options.header_timeout_s)
    key = service.next_key(writer_type.id_prefix)
    asked = read(body, key)
    writer = writer_type(asked)
    kind = writer.chunk_kind if asked.stream else writer.whole_kind
    envelope = Envelope(key.id, kind, int(time.time()), asked.model)
    return TurnResponse(
        _stream(service, writer, envelope) if asked.stream else _whole(service, writer, envelope),
        replies.ERRORS,
        stream=asked.stream,
        media_type="text/event-stream" if asked.stream else "application/json",
        preamble=b"".join(data_frame(envelope.around([entry])) for entry in writer.first()),
        head_delay=options.head_delay_s,
        silence=options.keepalive_s,
    )


async def _whole(service: Service, writer: ReplyWriter, envelope: Envelope) -> Frames:
    asked = writer.asked
    async with Choices(service, asked.model, asked.turns, asked.notes) as choices:
        said = [Said() for _ in asked.turns]
        complete: list[int] = []
        async for index, event in choices.events():
            if event is not None:
                said[index].add(event)
                continue
            complete.append(index)
            # the others may need the place that a complete turn holds; the last one waits for the client
            if len(complete) < len(choices):
                await choices.commit(index)
        made = [writer.choice(index, choices[index], each) for index, each in enumerate(said)]
        notes = tuple(note for each in said for note in each.notes)
        yield Last(to_json(envelope.around(made, usage=_usage(asked, choices), **_extras(choices[0], notes))))
        await choices.commit(complete[-1])


async def _stream(service: Service, writer: ReplyWriter, envelope: Envelope) -> Frames:
    asked = writer.asked
    async with Choices(service, asked.model, asked.turns, asked.notes) as choices:
        said = [Said() for _ in asked.turns]
        left = len(choices)
        async for index, event in choices.events():
            if event is not None:
                said[index].notes += [] if isinstance(event, Delta) else [event.message]
                if isinstance(event, Delta) and (event.text or event.logprobs):
                    yield data_frame(envelope.around([writer.delta(index, event)]))
                continue
            left -= 1
            *before, end = writer.last(index, choices[index])
            closing = b"".join(data_frame(envelope.around([entry])) for entry in before)
            closing += data_frame(envelope.around([end], **_extras(choices[index], tuple(said[index].notes))))
            if left:
                yield closing
            else:
                counts = envelope.around([], usage=_usage(asked, choices))
                yield Last(closing + (data_frame(counts) if asked.include_usage else b"") + DONE)
            await choices.commit(index)


def _usage(asked: OpenAIRequest, choices: Choices) -> dict[str, Any]:
    return replies.usage([choices[index].result for index in range(len(choices))], asked.prompts)


def _extras(reply: Reply, notes: tuple[str, ...]) -> dict[str, Any]:
    result = reply.result
    result = replace(result, warnings=(*result.warnings, *notes))
    return {"timings": replies.timings(result), "hipfire": replies.details(result, reply.request.thinking)}
