"""The daemon's lines: everything survives the way there and back, and whatever is wrong is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.base.errors import (
    ValidationError,
)
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.turn import (
    Aborted,
    Delta,
    Done,
    Event,
    Failed,
    Info,
    Ready,
    ResponseFormat,
    Started,
    TextLogprob,
    Thinking,
    ToolCall,
    ToolChoice,
    TurnKey,
    TurnRequest,
    TurnResult,
    TurnTimings,
    TurnUsage,
)
from hipfire.engine.wire import (
    LOWEST_LOGPROB,
    decode_event,
    decode_key,
    decode_message,
    decode_request,
    encode_event,
    encode_key,
    encode_message,
    encode_request,
    line_of,
    message_type,
    parse_line,
)
from hipfire.engine.wire_errors import MalformedError
from hipfire.engine.wire_messages import (
    BenchDecode,
    BenchPrefill,
    Configure,
    Diag,
    Load,
    LoadParams,
    Ping,
    ProcessConfig,
    Reset,
    Unload,
)

KEY = TurnKey("chatcmpl-1", 2)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.floats(-1e6, 1e6, allow_nan=False)
counts = st.integers(0, 2**40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, json_values, max_size=3)
keys = st.builds(TurnKey, texts.filter(bool), st.integers(0, 2**50))
requests = st.builds(
    TurnRequest,
    key=keys,
    messages=st.lists(objects, max_size=3).map(tuple),
    tools=st.lists(objects, max_size=2).map(tuple),
    tool_choice=st.builds(
        ToolChoice, st.sampled_from(["auto", "none", "required", "named"]), st.none() | texts, st.booleans()
    ),
    response_format=st.builds(
        ResponseFormat, st.sampled_from(["text", "json_object", "json_schema"]), st.none() | objects
    ),
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(-1, 99),
        penalty_window=st.integers(-1, 4096),
        seed=st.none() | st.integers(0, 2**64 - 1),
        logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
    ),
    sampling_given=st.none() | st.frozensets(st.sampled_from(["temperature", "top_k", "seed"])),
    generation=st.builds(
        GenerationParams,
        max_tokens=st.none() | st.integers(0, 9000),
        stop=st.lists(texts.filter(bool), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        top_logprobs=st.none() | st.integers(0, 20),
    ),
    thinking=st.builds(Thinking, st.none() | st.booleans(), st.none() | texts, st.none() | counts),
    template_arguments=objects,
    fit=st.booleans(),
    deadline=st.none() | st.floats(0, 1e9),
)
logprobs = st.builds(
    TextLogprob, texts, st.lists(st.integers(0, 255), max_size=3).map(tuple), st.floats(-90, 0)
)
results = st.builds(
    TurnResult,
    finish=st.sampled_from(["stop", "length", "tool_calls"]),
    usage=st.builds(TurnUsage, counts, counts, counts, counts),
    timings=st.builds(TurnTimings, floats, floats, floats, floats, floats, floats),
    seed=st.integers(0, 2**64 - 1),
    stop=st.none() | texts,
    calls=st.lists(st.builds(ToolCall, texts, objects), max_size=2).map(tuple),
    warnings=st.lists(texts, max_size=2).map(tuple),
    batch=counts,
)
events = st.one_of(
    st.builds(Started, keys, st.booleans(), counts, counts),
    st.builds(
        Delta,
        keys,
        st.sampled_from(["answer", "reasoning"]),
        texts,
        st.lists(st.builds(TextLogprob, texts, st.just((1, 2)), st.floats(-90, 0), st.tuples(logprobs))).map(
            tuple
        ),
    ),
    st.builds(Info, keys, texts),
    st.builds(Ready, keys, results),
    st.builds(Done, keys, results),
    st.builds(Aborted, keys, texts),
    st.builds(Failed, keys, texts, texts, texts, st.booleans()),
)


def there_and_back(record: dict[str, Any]) -> dict[str, Any]:
    line = line_of(record)
    assert line.isascii()
    assert line.count(b"\n") == 1
    return parse_line(line)


@settings(max_examples=40, deadline=None)
@given(requests)
def test_a_request_survives_the_wire(request: TurnRequest) -> None:
    assert decode_request(there_and_back(encode_request(request))) == request


@settings(max_examples=60, deadline=None)
@given(events)
def test_an_event_survives_the_wire(event: Event) -> None:
    assert decode_event(there_and_back(encode_event(event))) == event


@pytest.mark.parametrize(
    "message",
    [
        Configure(ProcessConfig(threads=3, debug=True)), Ping(), Diag(), Unload(force=True),
        Reset(attempt_id=7, force=True), BenchPrefill(128), BenchDecode(0, 32),
        Load("/models/a.hfq", LoadParams(512, "q8", slots=2, sampling=SamplingParams(0.3)), force=True),
    ],
)  # fmt: skip
def test_a_message_survives_the_wire(message: Any) -> None:
    record = there_and_back({**encode_message(message), "request": 4})
    assert message_type(record) == record["type"]
    assert decode_message(record) == message


def test_the_names_on_the_wire_are_those_of_the_protocol() -> None:
    request = TurnRequest(
        KEY,
        prompt="Hi",
        sampling=SamplingParams(penalty_window=9),
        fit=True,
        thinking=Thinking(True, "low", 64),
    )
    record = encode_request(request)
    expected = {
        "type": "generate", "id": "chatcmpl-1", "attempt_id": 2, "prompt": "Hi", "repeat_window": 9,
        "max_tokens_fit": True, "thinking_enabled": True, "reasoning_effort": "low", "max_think_tokens": 64,
    }  # fmt: skip
    assert expected.items() <= record.items()
    start = encode_event(Started(KEY, True, 12, 4))
    assert start == {
        "type": "gen_start", "id": "chatcmpl-1", "attempt_id": 2, "started_in_think": True,
        "prompt_tokens": 12, "cached_tokens": 4, "contract_version": 2,
    }  # fmt: skip
    assert encode_event(Delta(KEY, "answer", "a"))["type"] == "token"
    assert encode_event(Delta(KEY, "reasoning", "a"))["type"] == "reasoning"
    result = TurnResult("tool_calls", TurnUsage(9, 4, 5, 2), TurnTimings(1, 2, 3, 4, 5, 6), 7)
    ready, done = encode_event(Ready(KEY, result)), encode_event(Done(KEY, result))
    assert ready.pop("type") == "commit_ready"
    assert done.pop("type") == "done"
    # what the client is told before it commits is what it is told after
    assert ready == done
    assert ready["finish_reason"] == "tool_calls"
    assert (ready["prompt_tokens"], ready["cached_tokens"], ready["completion_tokens"]) == (9, 4, 5)
    error = encode_event(Failed(KEY, "context_length", "too long", "shorten", False))
    assert (error["type"], error["class"], error["retryable"]) == ("error", "context_length", False)


def test_what_is_left_out_has_the_defaults_of_a_turn() -> None:
    record = {"type": "generate", "id": "a", "attempt_id": 1, "prompt": "Hi"}
    assert decode_request(record) == TurnRequest(TurnKey("a", 1), prompt="Hi")
    assert decode_request({**record, "sampling_given": ["seed", "top_k"]}).sampling_given == {"seed", "top_k"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"id": 7}, "id"), ({"id": ""}, "id"), ({"id": "x" * 257}, "id"),
        ({"attempt_id": "1"}, "attempt_id"), ({"attempt_id": True}, "attempt_id"),
        ({"attempt_id": -1}, "attempt_id"),
        ({"prompt": ["a"]}, "prompt"), ({"prompt": None}, "messages or a prompt"),
        ({"messages": []}, "messages or a prompt"), ({"messages": "hello", "prompt": None}, "messages"),
        ({"messages": ["hello"], "prompt": None}, "messages[0]"),
        ({"temperature": 3}, "temperature"), ({"temperature": "1"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_k": 1.5}, "top_k"), ({"repeat_window": "9"}, "repeat_window"),
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": [[1, 2, 3]]}, "logit_bias[0]"), ({"logit_bias": [["1", 2]]}, "logit_bias[0][0]"),
        ({"stop": "END"}, "stop"), ({"stop": ["a", 5]}, "stop[1]"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"mode": "sometimes"}}, "tool_choice.mode"),
        ({"tool_choice": {"mood": "auto"}}, "tool_choice.'mood'"),
        ({"response_format": {"kind": "json_schema", "schema": []}}, "response_format.schema"),
        ({"thinking_enabled": 1}, "thinking_enabled"), ({"max_think_tokens": "9"}, "max_think_tokens"),
        ({"max_tokens_fit": "yes"}, "max_tokens_fit"), ({"deadline_s": "soon"}, "deadline_s"),
        ({"temprature": 0.5}, "did you mean temperature"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    record = {"type": "generate", "id": "a", "attempt_id": 1, "prompt": "Hi", **change}
    with pytest.raises(ValidationError) as caught:
        decode_request(record)
    assert named in caught.value.line()


@pytest.mark.parametrize("missing", ["id", "attempt_id"])
def test_a_turn_without_its_key_is_refused(missing: str) -> None:
    record = encode_key("commit", KEY)
    assert decode_key(record) == KEY
    del record[missing]
    with pytest.raises(ValidationError, match=f"{missing} is missing"):
        decode_key(record)


def test_text_of_every_script_travels_as_ascii() -> None:
    event = Delta(KEY, "answer", "größer 火 😀 \u2028\x00\n")
    assert decode_event(there_and_back(encode_event(event))) == event


def test_an_impossible_token_has_a_finite_logprob_on_the_wire() -> None:
    top = TextLogprob("b", (98,), -math.inf)
    event = Delta(KEY, "answer", "a", (TextLogprob("a", (97,), -0.25, (top,)),))
    decoded = decode_event(there_and_back(encode_event(event)))
    assert isinstance(decoded, Delta)
    assert decoded.logprobs[0].logprob == -0.25
    assert decoded.logprobs[0].top[0].logprob == LOWEST_LOGPROB


def test_keys_that_a_later_daemon_adds_to_an_event_are_left_alone() -> None:
    record = {**encode_event(Info(KEY, "hot")), "celsius": 90}
    assert decode_event(record) == Info(KEY, "hot")
    with pytest.raises(MalformedError, match="unknown event 'melted'"):
        decode_event({"type": "melted", "id": "a", "attempt_id": 1})
    done = encode_event(Done(KEY, TurnResult("stop", TurnUsage(1, 0, 1), TurnTimings(1, 1, 1, 1, 1, 1), 0)))
    with pytest.raises(ValidationError, match="finish_reason is 'melted'"):
        decode_event({**done, "finish_reason": "melted"})
