"""What a reply becomes: channels, the cap on thinking, stop strings, tool calls, formats, probabilities."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import tokenizers
from core_kit import (
    GREEDY,
    OPEN_TEMPLATE,
    OPENING,
    THINKING_TEMPLATE,
    TOOL_TEMPLATE,
    Stage,
    ids,
    limit,
    staged,
)

from hipfire.base.errors import HipfireError, UnsupportedError, ValidationError
from hipfire.base.sampling import SamplingParams
from hipfire.engine.openers import OpenerGuard
from hipfire.engine.turn import (
    Delta,
    Failed,
    ResponseFormat,
    Thinking,
    ToolCall,
    ToolChoice,
)
from hipfire.text.tokenizer import Tokenizer
from tiny_models import tokenizer_text

ASKED = f"<|im_start|>user\nhi<|im_end|>\n{OPENING}"
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
WAIT: dict[str, Any] = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def thinking(*lines: tuple[str, str], opened: bool = True, **rest: Any) -> Stage:
    stage = Stage(staged(template=OPEN_TEMPLATE if opened else THINKING_TEMPLATE, **rest))
    for prompt, reply in lines:
        stage.script(prompt, reply)
    return stage


def test_reasoning_and_answer_go_to_their_channels_and_are_counted() -> None:
    stage = thinking((f"{ASKED}<think>\n", "hm hm</think>\n\nfine"))
    stage.chat("a", "hi")
    result = stage.finish("a")
    assert stage.started("a").in_thinking
    assert (stage.text("a", "reasoning"), stage.text("a")) == ("hm hm", "fine")
    assert result.usage.completion == len("hm hm</think>\n\nfine") + 1
    assert len("hm hm") <= result.usage.reasoning <= len("hm hm</think>")


def test_a_model_may_open_its_thought_itself() -> None:
    stage = thinking((ASKED, "<think>\nhm</think>\n\nfine"), opened=False)
    stage.chat("a", "hi")
    stage.finish("a")
    assert not stage.started("a").in_thinking
    assert (stage.text("a", "reasoning").strip(), stage.text("a")) == ("hm", "fine")


def test_thinking_off_closes_a_thought_that_the_template_opens_regardless() -> None:
    stage = thinking((f"{ASKED}<think>\n</think>\n\n", "fine"))
    stage.chat("a", "hi", thinking=Thinking(enabled=False))
    result = stage.finish("a")
    assert not stage.started("a").in_thinking
    assert (stage.text("a", "reasoning"), stage.text("a"), result.warnings) == ("", "fine", ())


@pytest.mark.parametrize("cap", [1, 4, 7])
def test_the_cap_closes_the_thought_as_if_the_model_had(cap: int) -> None:
    thought = "I could go on for ever"
    opened = f"{ASKED}<think>\n"
    # the actor answers only if the close was fed to it like tokens of its own
    stage = thinking((opened, thought), (f"{opened}{thought[:cap]}</think>\n\n", "fine"))
    stage.chat("a", "hi", thinking=Thinking(cap=cap))
    result = stage.finish("a")
    assert (stage.text("a", "reasoning"), stage.text("a")) == (thought[:cap], "fine")
    assert result.finish == "stop"
    assert result.usage.completion == cap + len("</think>\n\n") + len("fine") + 1


def test_without_a_cap_a_thought_ends_with_the_budget() -> None:
    stage = thinking((f"{ASKED}<think>\n", "for ever and ever"))
    stage.chat("a", "hi", thinking=Thinking(cap=0), **limit(9))
    result = stage.finish("a")
    assert (stage.text("a", "reasoning"), stage.text("a"), result.finish) == ("for ever ", "", "length")


def test_an_end_token_inside_of_a_thought_closes_it() -> None:
    opened = f"{ASKED}<think>\n"
    stage = thinking((opened, "hm"), (f"{opened}hm</think>\n\n", "fine"))
    stage.chat("a", "hi")
    result = stage.finish("a")
    assert (stage.text("a", "reasoning"), stage.text("a"), result.finish) == ("hm", "fine", "stop")


@pytest.mark.parametrize("stop", ["Question:", "n:"])
def test_a_stop_string_counts_in_the_answer_only(stop: str) -> None:
    stage = thinking((f"{ASKED}<think>\n", "Question: hm</think>\n\nWell. Question: no"))
    stage.chat("a", "hi", **limit(stop=(stop,)))
    result = stage.finish("a")
    assert stage.text("a", "reasoning") == "Question: hm"
    assert stage.text("a") == "Well. Question:"[: -len(stop)]
    assert (result.finish, result.stop) == ("stop", stop)


def test_a_long_stop_string_delays_nothing_that_does_not_begin_it() -> None:
    stage = Stage()
    stage.script("ask", "plain words")
    stage.submit("a", "ask", **limit(stop=("X" * 40,)))
    for count in range(1, 5):
        stage.core.step()
        assert len(stage.text("a")) == count


def tools(reply: str, *given: dict[str, Any], **fields: Any) -> Stage:
    """A stage on which whatever is asked gets this reply."""
    stage = Stage(staged(template=TOOL_TEMPLATE, max_seq=1500))
    stage.actor.always = ids(reply)
    stage.chat("a", "hi", tools=given, **fields)
    stage.run()
    stage.commit("a")
    return stage


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky", "n": "2"}}\n</tool_call>'
WAITS = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
LOOKS = ToolCall("look", {"at": "sky", "n": 2})


def test_a_call_ends_the_turn_as_tool_calls_and_is_no_text() -> None:
    stage = tools(f"I look.\n{CALL}", LOOK)
    result = stage.result("a")
    assert (result.finish, result.calls) == ("tool_calls", (LOOKS,))
    assert stage.text("a").strip() == "I look."


def test_what_is_no_call_is_an_answer() -> None:
    stage = tools("<tool_call> is how one calls", LOOK)
    assert (stage.result("a").finish, stage.result("a").calls) == ("stop", ())
    assert stage.text("a") == "<tool_call> is how one calls"


def test_tool_choice_none_hides_the_tools_and_strips_calls() -> None:
    stage = tools(f"No. {CALL}", LOOK, tool_choice=ToolChoice("none"))
    assert (stage.result("a").finish, stage.result("a").calls) == ("stop", ())
    assert stage.text("a").strip() == "No."
    assert "parameters" not in prompt_of(stage)


def test_one_call_is_left_where_parallel_ones_are_not_wanted() -> None:
    assert len(tools(CALL + WAITS, LOOK, WAIT).result("a").calls) == 2
    result = tools(CALL + WAITS, LOOK, WAIT, tool_choice=ToolChoice(parallel=False)).result("a")
    assert result.calls == (LOOKS,)
    assert "1 further tool call" in result.warnings[0]


def prompt_of(stage: Stage) -> str:
    tokens = [token for _, _, token in stage.actor.fed]
    return stage.loaded.tokenizer.decode(tokens, skip_special=False)


def test_a_named_choice_filters_tools_and_says_so() -> None:
    stage = tools(CALL, LOOK, WAIT, tool_choice=ToolChoice("named", "look"))
    assert stage.result("a").calls == (LOOKS,)
    assert "Answer by calling the function look." in prompt_of(stage)
    assert '"wait"' not in prompt_of(stage)


@pytest.mark.parametrize(("choice", "reply"), [("required", "No."), ("named", "No."), ("named", CALL)])
def test_a_demanded_call_that_does_not_come_is_an_error(choice: Any, reply: str) -> None:
    stage = tools(reply, LOOK, WAIT, tool_choice=ToolChoice(choice, "wait" if choice == "named" else None))
    [event] = stage.terminals("a")
    assert isinstance(event, Failed)
    assert "did not call a tool" in event.message


def test_a_call_that_the_limit_cuts_is_not_released() -> None:
    stage = tools(CALL, LOOK, **limit(len('<tool_call>\n{"name": "look", "arguments": {"at": "sky"')))
    result = stage.result("a")
    assert (result.finish, result.calls) == ("length", ())


def test_a_call_that_was_complete_when_the_limit_came_is_released() -> None:
    result = tools(CALL, LOOK, **limit(len(ids(CALL)))).result("a")
    assert (result.finish, result.calls, result.warnings) == ("tool_calls", (LOOKS,), ())
    # the second one is cut, the first is not
    result = tools(CALL + WAITS, LOOK, WAIT, **limit(len(ids(CALL + WAITS)) - 1)).result("a")
    assert result.calls == (LOOKS,)
    assert "cut inside of a tool call" in result.warnings[0]


def refused(stage: Stage, kind: type[HipfireError], **fields: Any) -> str:
    message = ({"role": "user", "content": "hi"},)
    with pytest.raises(kind) as caught:
        stage.core.submit(stage.request("bad", messages=message, **fields), [].append)
    assert stage.core.live == 0
    return caught.value.line()


def test_tools_that_cannot_be_honoured_are_refused() -> None:
    assert "does not know tools" in refused(Stage(), UnsupportedError, tools=(LOOK,))
    stage = Stage(staged(template=TOOL_TEMPLATE))
    assert "needs tools" in refused(stage, ValidationError, tool_choice=ToolChoice("required"))
    named = ToolChoice("named", "fly")
    line = refused(stage, ValidationError, tools=(LOOK,), tool_choice=named)
    assert "'fly'" in line
    assert "name one of the tools" in line
    wanted = ResponseFormat("json_object")
    assert "both" in refused(stage, UnsupportedError, tools=(LOOK,), response_format=wanted)


def test_an_answer_follows_its_schema_whatever_the_model_prefers() -> None:
    stage = Stage()
    stage.script(ASKED, '{"n": 12, "m": 3}')
    stage.chat("a", "hi", response_format=ResponseFormat("json_schema", SCHEMA), **limit(60))
    result = stage.finish("a")
    # the actor's second field is not allowed, and afterwards it is lost for words
    assert stage.text("a").startswith('{"n": 12')
    assert result.finish in ("stop", "length")
    if result.finish == "stop":
        assert set(json.loads(stage.text("a"))) == {"n"}


def test_an_answer_is_over_when_nothing_more_may_follow() -> None:
    stage = Stage()
    stage.script(ASKED, '{"n":12} and so on')
    stage.chat("a", "hi", response_format=ResponseFormat("json_schema", SCHEMA))
    result = stage.finish("a")
    assert (stage.text("a"), result.finish) == ('{"n":12}', "stop")


def test_a_json_object_is_one_whatever_the_model_wants_to_say() -> None:
    stage = Stage()
    stage.script(ASKED, "Sure! Here you are.")
    stage.chat("a", "hi", response_format=ResponseFormat("json_object"), **limit(30))
    stage.finish("a")
    assert stage.text("a").startswith("{")


def test_a_format_binds_the_answer_and_not_the_thought() -> None:
    stage = thinking((f"{ASKED}<think>\n", 'a number, say 7</think>\n\n{"n":7}'))
    opened = f"{ASKED}<think>\n"
    stage.script(f"{opened}a number, say 7</think>", '{"n":7}')
    stage.chat("a", "hi", response_format=ResponseFormat("json_schema", SCHEMA))
    stage.finish("a")
    assert stage.text("a", "reasoning") == "a number, say 7"
    assert json.loads(stage.text("a")) == {"n": 7}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "thing"}, "Invalid type: thing"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "http://example.com/s.json"}, "example.com"),
        ({"type": "object", "properties": {"a": math.nan}}, "not JSON"),
        # nobody would see the end of these two
        (nested(300), "recursion limit"),
        ({"$ref": "#"}, "no text fits"),
        ({"type": "string", "pattern": "(" * 10_000 + "a" + ")" * 10_000}, "regex"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_at_once(schema: dict[str, Any], part: str) -> None:
    wanted = ResponseFormat("json_schema", schema)
    line = refused(Stage(), ValidationError, response_format=wanted)
    assert part in line
    assert "\n" not in line
    assert len(line) < 500


def test_every_shown_token_has_its_probability_and_only_those() -> None:
    stage = thinking((f"{ASKED}<think>\n", "hm</think>\n\nyes"))
    stage.chat("a", "hi", **limit(top_logprobs=2))
    stage.finish("a")
    for channel, text in (("reasoning", "hm"), ("answer", "yes")):
        deltas = [e for e in stage.events["a"] if isinstance(e, Delta) and e.channel == channel]
        scores = [score for delta in deltas for score in delta.logprobs]
        assert "".join(score.text for score in scores).strip() == text
        certain = 10.0 - math.log(math.exp(10.0) + stage.actor.vocab_size - 1)
        for score in scores:
            assert score.logprob == pytest.approx(certain)
            assert len(score.top) == 2
            assert (score.top[0].text, score.top[0].logprob) == (score.text, score.logprob)
            assert bytes(score.bytes).decode() == score.text


def test_no_probabilities_unless_they_are_asked_for() -> None:
    stage = Stage()
    stage.script("ask", "yes")
    stage.submit("a", "ask")
    stage.finish("a")
    assert all(not event.logprobs for event in stage.events["a"] if isinstance(event, Delta))


def test_a_bias_reaches_the_draw_and_a_token_that_does_not_exist_is_refused() -> None:
    stage = Stage()
    stage.script("ask", "yes")
    biased = SamplingParams(temperature=0.0, logit_bias=((ord("n"), 20.0),))
    stage.submit("a", "ask", sampling=biased, **limit(2))
    stage.submit("b", "ask")
    for token in (264, 10**9):
        bad = SamplingParams(logit_bias=((token, 1.0),))
        assert "logit_bias" in refused(Stage(), ValidationError, sampling=bad)
    stage.run()
    # the neighbour in the batch is not biased
    assert (stage.text("a"), stage.text("b")) == ("nn", "yes")


def test_a_seeded_reply_does_not_depend_on_its_neighbours() -> None:
    def drawn(neighbours: int) -> str:
        stage = Stage(staged(slots=4))
        seeded = SamplingParams(temperature=2.0, seed=5)
        stage.script("ask", "yes, of course")
        for number in range(neighbours):
            other = SamplingParams(temperature=2.0, seed=number if number % 2 else None)
            stage.submit(str(number), "ask", sampling=other, **limit(12))
        stage.submit("a", "ask", sampling=seeded, **limit(12))
        stage.run()
        assert stage.result("a").seed == 5
        return stage.text("a")

    assert drawn(0) == drawn(1) == drawn(3)
    assert GREEDY.seed is None


def with_marker_tokens(template: str) -> tuple[Stage, int, int]:
    """A stage whose vocabulary has the thinking markers as special tokens, and their ids."""
    engine = tokenizers.Tokenizer.from_str(tokenizer_text())
    engine.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<think>", "</think>")])
    plain = staged(template=template)
    assets = dataclasses.replace(plain.assets, tokenizer_json=engine.to_str())
    tokenizer = Tokenizer.from_assets(assets, plain.model.vocab_size)
    opener, closer = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert opener is not None
    assert closer is not None
    assert tokenizer.is_special(opener)
    return Stage(dataclasses.replace(plain, tokenizer=tokenizer, assets=assets)), opener, closer


def test_markers_that_are_special_tokens_lead_to_the_channels_too() -> None:
    stage, opener, closer = with_marker_tokens(THINKING_TEMPLATE)
    stage.actor.always = [opener, *ids("hm"), closer, *ids("fine")]
    stage.chat("a", "hi")
    result = stage.finish("a")
    assert (stage.text("a", "reasoning"), stage.text("a")) == ("hm", "fine")
    assert result.usage.completion == len("hm") + len("fine") + 3


def test_a_cap_closes_with_the_token_that_the_model_would_use() -> None:
    stage, opener, closer = with_marker_tokens(THINKING_TEMPLATE)
    stage.actor.always = [opener, *ids("abc"), closer, *ids("\n\nfine")]
    stage.chat("a", "hi", thinking=Thinking(enabled=True, cap=3))
    stage.finish("a")
    assert (stage.text("a", "reasoning"), stage.text("a")) == ("abc", "fine")
    assert [token for _, _, token in stage.actor.fed].count(closer) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_a_model_may_think_before_an_answer_with_a_format_unless_thinking_is_off(enabled: bool) -> None:
    stage, opener, closer = with_marker_tokens(THINKING_TEMPLATE)
    stage.actor.always = [opener, *ids("seven?"), closer, *ids('{"n":7}')]
    wanted = ResponseFormat("json_schema", SCHEMA)
    stage.chat("a", "hi", response_format=wanted, thinking=Thinking(enabled=enabled), **limit(60))
    stage.finish("a")
    assert stage.text("a", "reasoning") == ("seven?" if enabled else "")
    assert stage.text("a").startswith('{"n":7}' if enabled else "{")


def test_a_model_that_only_opens_thoughts_is_made_to_say_something_else() -> None:
    stage, opener, _ = with_marker_tokens(THINKING_TEMPLATE)
    stage.actor.always = [opener] * 9
    stage.chat("a", "hi", **limit(9))
    stage.finish("a")
    fed = [token for _, _, token in stage.actor.fed][-8:]
    assert fed[:2] == [opener, opener]
    assert opener not in fed[2:]


@pytest.mark.parametrize(
    ("tokens", "banned"),
    [
        ([], []),
        ([1], []),
        ([1, 1], [1]),
        ([1, 5, 1], [1]),
        ([1, 2, 1], []),
        ([1, 1, 2], []),
        # a closer without an opener counts for nothing
        ([2, 2, 1, 1], [1]),
        ([1, 1, *[5] * 18], [1]),
        ([1, 1, *[5] * 19], []),
        ([3, 3, 1], [3]),
    ],
)
def test_openers_that_stand_open_among_the_newest_tokens(tokens: list[int], banned: list[int]) -> None:
    known = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}
    assert OpenerGuard(tuple(known), known.get).banned(tokens) == banned
    # markup that the template does not use, or that is no token, is ordinary text
    assert OpenerGuard((), known.get).banned(tokens) == []
    assert OpenerGuard(tuple(known), {"<think>": 1}.get).banned(tokens) == []
