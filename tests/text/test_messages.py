import copy

import pytest

from hipfire.base.errors import ValidationError
from hipfire.text.messages import ROLES, normalize_messages, normalize_tools

USER = {"role": "user", "content": "hi"}


def calling(arguments, **message):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **message}


def arguments_of(message):
    return normalize_messages([message])[0]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_a_tool_call_without_content_is_one_form(content):
    message = {key: value for key, value in calling({}).items() if key != "content"} | content
    assert normalize_messages([message]) == normalize_messages([calling({}, content="")])
    assert normalize_messages([message])[0]["content"] == ""


def test_as_many_messages_come_out_as_went_in():
    messages = [USER, calling(None), {"role": "tool", "content": None}, {"role": "assistant"}, USER, USER]
    made = normalize_messages(messages)
    assert [message["role"] for message in made] == [message["role"] for message in messages]
    assert all(isinstance(message["content"], str) for message in made)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("parts", "want"),
    [
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([], ""),
    ],
)
def test_content_parts_become_one_string_for_every_role(role, parts, want):
    assert normalize_messages([{"role": role, "content": parts}])[0]["content"] == want


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
        ({"text": "no type"}, "None"),
        ({"type": "text"}, "no text"),
        ({"type": "text", "text": 5}, "no text"),
        ("bare", "str"),
        (7, "int"),
    ],
)
def test_other_parts_are_refused_by_name(role, part, match):
    with pytest.raises(ValidationError, match=match) as caught:
        normalize_messages([USER, {"role": role, "content": [{"type": "text", "text": "x"}, part]}])
    assert "messages[1].content[1]" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ('{"at": "sky", "n": [1, 2.5, null]}', {"at": "sky", "n": [1, 2.5, None]}),
        ({"at": "sky"}, {"at": "sky"}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        (None, {}),
        ("{}", {}),
    ],
)
def test_arguments_are_mappings(arguments, want):
    assert arguments_of(calling(arguments)) == want


@pytest.mark.parametrize(
    "arguments",
    ["{not json", "[1]", '"text"', "3", '{"a": NaN}', "[" * 100_000, [1], 3, {"a": {1, 2}}, {1: "a"}],
)
def test_arguments_that_are_no_json_object_are_refused_naming_the_call(arguments):
    with pytest.raises(ValidationError, match=r"messages\[0\]\.tool_calls\[0\] \(look\)"):
        normalize_messages([calling(arguments)])


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (None, "non-empty list"),
        (["hello"], r"messages\[0\] is of type str"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"content": "x"}], "None"),
        ([{"role": ["user"], "content": "x"}], "user"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": 5}], "int"),
        ([{"role": "assistant", "tool_calls": "x"}], "not a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "function with a name"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "function with a name"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}], "function with a name"),
        ([{"role": "user", "content": "x", "extra": object()}], "JSON cannot hold"),
    ],
)
def test_other_shapes_are_refused(messages, match):
    with pytest.raises(ValidationError, match=match):
        normalize_messages(messages)


def test_deep_nesting_is_refused_not_a_crash():
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(ValidationError, match="nested"):
        normalize_messages([calling(deep)])
    with pytest.raises(ValidationError, match="nested"):
        normalize_tools([deep])


def test_nothing_of_the_callers_is_shared_or_changed():
    messages = [USER, calling({"at": ["sky"]}, reasoning_content="r")]
    before = copy.deepcopy(messages)
    made = normalize_messages(messages)
    made[1]["tool_calls"][0]["function"]["arguments"]["at"].append("sea")
    made[1]["reasoning_content"] = "other"
    assert messages == before
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"a": [1]}}}]
    copied = normalize_tools(tools)
    assert copied == tools
    copied[0]["function"]["parameters"]["a"].append(2)
    assert tools[0]["function"]["parameters"] == {"a": [1]}


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_is_none(tools):
    assert normalize_tools(tools) is None


@pytest.mark.parametrize("tools", ["x", [1], {"a": 1}])
def test_tools_of_another_shape_are_refused(tools):
    with pytest.raises(ValidationError, match="tools"):
        normalize_tools(tools)
