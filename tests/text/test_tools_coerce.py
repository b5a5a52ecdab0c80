"""Arguments brought to the types of a schema, one line for each change."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipfire.text.tools.coerce import coerce_arguments


def fitted(value: Any, schema: Any) -> Any:
    return coerce_arguments({"x": value}, {"properties": {"x": schema}})[0]["x"]


ARRAY = {"type": "array", "items": {"type": "integer"}}
THING = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


@pytest.mark.parametrize(
    ("value", "schema", "wanted"),
    [
        ("true", {"type": "boolean"}, True),
        (" False ", {"type": "boolean"}, False),
        ("3", {"type": "integer"}, 3),
        ("-3.0", {"type": "integer"}, -3),
        (3.0, {"type": "integer"}, 3),
        ("3", {"type": "number"}, 3),
        ("1e3", {"type": "number"}, 1000.0),
        ("-0.5", {"type": "number"}, -0.5),
        ("null", {"type": "null"}, None),
        ("None", {"type": ["integer", "null"]}, None),
        ("[1, 2]", ARRAY, [1, 2]),
        (["1", 2.0, "x"], ARRAY, [1, 2, "x"]),
        ('["1"]', ARRAY, [1]),
        ('{"on": "true"}', THING, {"on": True}),
        ({"on": "false", "more": "1"}, THING, {"on": False, "more": "1"}),
        (3, {"type": "string"}, "3"),
        (True, {"type": "string"}, "true"),
        (1.5, {"type": "string"}, "1.5"),
        ("3", {"enum": [1, 3]}, 3),
        ("3", {"const": 3}, 3),
        (3, {"enum": ["1", "3"]}, "3"),
        ("true", {"anyOf": [{"type": "null"}, {"type": "boolean"}]}, True),
        ("5", {"oneOf": [{"type": "integer"}, ARRAY]}, 5),
        ("[5]", {"oneOf": [{"type": "integer"}, ARRAY]}, [5]),
        ("3", {"allOf": [{"type": "integer"}]}, 3),
        ({"a": "1"}, {"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}),
        (["1", "2"], {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [1, "2"]),
        ({"a": "1"}, {"allOf": [{"properties": {"a": {"type": "integer"}}}]}, {"a": 1}),
    ],
)
def test_converted(value: Any, schema: Any, wanted: Any) -> None:
    made = fitted(value, schema)
    assert made == wanted
    assert repr(made) == repr(wanted)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("yes", {"type": "boolean"}),
        (1, {"type": "boolean"}),
        ("1_000", {"type": "integer"}),
        ("007", {"type": "number"}),
        ("0x10", {"type": "integer"}),
        ("3.5", {"type": "integer"}),
        (3.5, {"type": "integer"}),
        ("nan", {"type": "number"}),
        ("1e999", {"type": "number"}),
        ("9" * 5000, {"type": "integer"}),
        ("[1", ARRAY),
        ('{"on": 1}', ARRAY),
        ("a, b", ARRAY),
        ("[NaN]", ARRAY),
        ({"a": 1}, {"type": "string"}),
        ([1], {"type": "string"}),
        (None, {"type": "string"}),
        ("02134", {"type": "string"}),
        ("true", {"type": "string"}),
        ("3", {"type": ["string", "integer"]}),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (3, {"type": "number"}),
        (True, {"enum": [1, 0]}),
        ("medium", {"enum": ["low", "high"]}),
        ("3", {}),
        ("3", True),
        ("3", {"type": "unheard-of"}),
        ("3", {"type": 5, "enum": "x", "anyOf": "y", "properties": 3}),
        ({"a": 1}, {"anyOf": [{"type": "object", "required": [["a"], {}]}]}),
    ],
)
def test_left_as_it_is(value: Any, schema: Any) -> None:
    made, lines = coerce_arguments({"x": value}, {"properties": {"x": schema}})
    assert repr(made["x"]) == repr(value)
    assert lines == ()


def test_choices_by_what_objects_require() -> None:
    circle = {"properties": {"kind": {"const": "circle"}, "r": {"type": "number"}}, "required": ["kind", "r"]}
    square = {
        "properties": {"kind": {"const": "square"}, "a": {"type": "integer"}},
        "required": ["kind", "a"],
    }
    shapes = {"anyOf": [circle, square]}
    assert fitted({"kind": "square", "a": "2"}, shapes) == {"kind": "square", "a": 2}
    assert fitted({"kind": "circle", "r": "2.5"}, shapes) == {"kind": "circle", "r": 2.5}
    assert fitted({"kind": "line", "a": "2"}, shapes) == {"kind": "line", "a": "2"}


def test_references_inside_the_schema() -> None:
    schema = {
        "properties": {"level": {"$ref": "#/$defs/level"}, "tree": {"$ref": "#/$defs/tree"}},
        "$defs": {
            "level": {"enum": [1, 2]},
            "tree": {"properties": {"size": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}},
        },
    }
    arguments = {"level": "2", "tree": {"size": "1", "next": {"size": "2", "next": {"size": "3"}}}}
    made, lines = coerce_arguments(arguments, schema)
    assert made == {"level": 2, "tree": {"size": 1, "next": {"size": 2, "next": {"size": 3}}}}
    assert [line.partition(":")[0] for line in lines] == [
        "level",
        "tree.size",
        "tree.next.size",
        "tree.next.next.size",
    ]


def test_every_change_has_its_line_and_names_the_place() -> None:
    schema = {"properties": {"a": {"type": "array", "items": THING}, "b": {"type": "string"}}}
    _, lines = coerce_arguments({"a": [{"on": True}, {"on": "true"}], "b": 1, "c": "x"}, schema)
    assert lines == ("a[1].on: string 'true' made boolean", "b: integer '1' made string")


def test_a_choice_that_was_tried_and_dropped_leaves_no_line() -> None:
    schema = {"anyOf": [{"type": "array", "items": THING}, {"type": "array", "items": {"type": "string"}}]}
    made, lines = coerce_arguments({"x": ["true", 1]}, {"properties": {"x": schema}})
    assert made == {"x": ["true", "1"]}
    assert lines == ("x[1]: integer '1' made string",)


def test_the_arguments_that_came_in_are_not_changed() -> None:
    arguments = {"x": [{"on": "true"}]}
    coerce_arguments(arguments, {"properties": {"x": {"items": THING}}})
    assert arguments == {"x": [{"on": "true"}]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"oneOf": [{"type": "null"}, schema]}]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"$ref": "#/nowhere/0"}}},
        {"properties": {"x": {"$ref": "other.json"}}},
        {"properties": {"x": nested(40)}},
        {"allOf": [{"$ref": "#"}]},
        None,
        "schema",
    ],
    ids=range(10),
)
@pytest.mark.parametrize("texts", [False, True])
def test_a_schema_that_leads_nowhere_changes_nothing_and_costs_little(schema: Any, texts: bool) -> None:
    began = time.perf_counter()
    assert coerce_arguments({"x": "word"}, schema, texts=texts) == ({"x": "word"}, ())
    assert time.perf_counter() - began < 2


kinds = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(values, st.lists(kinds, min_size=1, max_size=3))
def test_coercing_again_changes_nothing_more(value: Any, types: list[str]) -> None:
    schema = {"properties": {"x": {"type": types, "items": {"type": types}}}}
    once, _ = coerce_arguments({"x": value}, schema)
    assert coerce_arguments(once, schema) == (once, ())
