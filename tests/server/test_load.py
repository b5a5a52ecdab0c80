"""Many clients at once, some of which leave or send nonsense: each gets one answer, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
from scripted_backend import MODEL, Fail, Say, Script, Wait, think
from server_kit import eventually, frames, serving

from hipfire.engine.turn import TurnRequest

PATH = "/v1/chat/completions"
CLIENTS, ROUNDS = 24, 6
STATUSES = {
    "whole": 200,
    "bad json": 400,
    "bad field": 400,
    "too large": 413,
    "unknown model": 404,
    "fails": 503,
}


def script(request: TurnRequest) -> Script:
    """Answer what was said, after a while."""
    said = (request.messages or ())[0]["content"]
    if said.startswith("fails"):
        return [Wait(0.002, before_start=True), Fail("transient", "no luck", before_start=True)]
    return [think("Hm"), Wait(0.005), Say(f"You said: {said}", size=2)]


async def ask(client: httpx.AsyncClient, kind: str, text: str) -> str:
    """Send one request; return how it ended, which must be what its kind calls for."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"{kind} {text}"}]}
    if kind == "leaves":
        try:
            await client.post(PATH, json=body, timeout=random.Random(text).uniform(0.001, 0.03))
        except httpx.TimeoutException:
            return "left"
        return "finished"
    if kind == "stream":
        response = await client.post(PATH, json={**body, "stream": True})
        *chunks, end = frames(response.text.splitlines())
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert (said, end, finishes.count("stop")) == (f"You said: stream {text}", "[DONE]", 1)
        return "streamed"
    if kind == "bad json":
        response = await client.post(PATH, content=b'{"model": ')
    elif kind == "too large":
        response = await client.post(PATH, content=b"x" * 40_000)
    else:
        changes = {"bad field": {"top_p": 7}, "unknown model": {"model": "none"}}.get(kind, {})
        response = await client.post(PATH, json={**body, **changes})
    assert response.status_code == STATUSES[kind], response.text
    if kind == "whole":
        assert response.json()["choices"][0]["message"]["content"] == f"You said: whole {text}"
    return "answered"


async def storm(url: str) -> Counter[str]:
    kinds = [*STATUSES, "leaves", "leaves", "leaves", "stream", "stream"]
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits, verify=False) as client:

        async def one(number: int) -> list[str]:
            order = random.Random(number)
            return [await ask(client, order.choice(kinds), f"{number}/{each}") for each in range(ROUNDS)]

        ends = await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return Counter(end for each in ends for end in each)


def test_every_request_has_one_end_and_nothing_is_left() -> None:
    with serving(script, slots=4, max_queue=0, max_request_bytes=32_768) as live:
        ends = asyncio.run(storm(live.url))
        assert ends.total() == CLIENTS * ROUNDS
        assert ends["left"] > 0
        assert eventually(lambda: live.service.gauges()["hipfire_turns_running"] == 0)
        assert live.service.gauges()["hipfire_queue_depth"] == 0
        assert live.backend.running == 0
        assert set(live.backend.ended.values()) <= {"done", "aborted", "failed"}
        assert len(live.backend.ended) == len(live.backend.seen)
        # one commit for each turn that was told to its end, and none for another
        assert len(live.backend.commits) == list(live.backend.ended.values()).count("done")
        assert len(live.backend.commits) >= ends["streamed"]
        assert len(live.backend.loads) == 1
        assert live.get("/health").json()["ready"] is True
