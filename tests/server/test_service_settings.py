"""What the server adds to a request, and how it has models loaded."""

from __future__ import annotations

from pathlib import Path

from scripted_backend import MODEL, ScriptedBackend
from service_kit import HELLO, finish, run, turn

from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.turn import Thinking
from hipfire.engine.wire_messages import LoadParams
from hipfire.server.options import ModelSettings
from hipfire.server.service import Service


def test_load_parameters_are_those_of_the_engine(tmp_path: Path) -> None:
    settings = ModelSettings(load={"max_seq": 512, "kv_mode": "q8"})

    async def test(service: Service, backend: ScriptedBackend) -> None:
        await finish(await service.open(MODEL, turn("a")))
        path, params = backend.loads[0]
        assert path == tmp_path / f"{MODEL}.hf4"
        # every name must be one that the daemon knows
        made = LoadParams(**params)
        assert (made.max_seq, made.kv_mode, made.slots, made.max_queue) == (512, "q8", 3, 7)
        assert made.sampling == SamplingParams(temperature=0.3)

    run(
        test,
        tmp_path,
        slots=3,
        max_queue=7,
        settings_of=lambda model: settings,
        default_sampling=SamplingParams(temperature=0.3),
    )


def test_settings_stand_in_for_what_a_request_leaves_out(tmp_path: Path) -> None:
    settings = ModelSettings(
        {"temperature": 0.5, "top_k": 9}, 77, "Be kind.", Thinking(True, "low", 64), load={}
    )

    async def test(service: Service, backend: ScriptedBackend) -> None:
        chosen = turn(
            "a",
            sampling=SamplingParams(temperature=0.0),
            sampling_given=frozenset({"temperature"}),
            thinking=Thinking(effort="high"),
        )
        await finish(await service.open(MODEL, chosen))
        sent = backend.seen[0]
        assert (sent.sampling.temperature, sent.sampling.top_k) == (0.0, 9)
        assert sent.sampling_given == {"temperature", "top_k"}
        assert (sent.generation.max_tokens, sent.fit) == (77, True)
        assert sent.thinking == Thinking(True, "high", 64)
        assert [message["role"] for message in sent.messages or ()] == ["system", "user"]
        assert sent.deadline == 9.0
        own = turn(
            "b",
            messages=({"role": "system", "content": "Mine."}, *HELLO),
            generation=GenerationParams(max_tokens=5),
            thinking=Thinking(False),
            deadline=1.0,
        )
        await finish(await service.open(MODEL, own))
        sent = backend.seen[1]
        assert [message["content"] for message in sent.messages or ()] == ["Mine.", "Hello"]
        assert (sent.generation.max_tokens, sent.fit, sent.deadline) == (5, False, 1.0)
        # off stands alone: what is set for the other axes would contradict it
        assert sent.thinking == Thinking(False)

    run(test, tmp_path, settings_of=lambda model: settings, request_timeout_s=9.0)


def test_tidy_text_is_for_what_people_say_only(tmp_path: Path) -> None:
    untidy = "a  \r\n\n\n\nb\u00a0c "
    messages = (
        *({"role": role, "content": untidy} for role in ("system", "user", "assistant", "tool")),
        {"role": "user", "content": [{"type": "text", "text": untidy}]},
    )

    async def test(service: Service, backend: ScriptedBackend) -> None:
        await finish(await service.open(MODEL, turn("a", messages=messages)))
        tidy = "a\n\nb c"
        sent = [message["content"] for message in backend.seen[0].messages or ()]
        expected = [tidy, tidy, untidy, untidy, [{"type": "text", "text": tidy}]]
        assert sent == (expected if service.options.normalize else [m["content"] for m in messages])

    run(test, tmp_path)
    run(test, tmp_path, normalize=False)
