"""Caller's text is lower case here, the template's upper case: every character shows where it is from."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.text.origin import (
    CallerText,
    RenderedPrompt,
    carries_caller_text,
    join_text,
    mark,
    repeat_text,
    replace_text,
    spans_of,
)

CALLER, TEMPLATE = "ab ", "AB\n"


@st.composite
def mixtures(draw):
    parts = draw(
        st.lists(
            st.one_of(
                st.text(alphabet=CALLER, max_size=4).map(CallerText), st.text(alphabet=TEMPLATE, max_size=4)
            ),
            max_size=5,
        )
    )
    return join_text(parts)


def check(value):
    """Every character's origin is the one that its case says."""
    if isinstance(value, str):
        marked = {index for first, last in spans_of(value) for index in range(first, last)}
        assert marked == {index for index, letter in enumerate(str.__str__(value)) if letter in CALLER}
        edges = [edge for span in spans_of(value) for edge in span]
        assert edges == sorted(set(edges))
    else:
        for item in value:
            check(item)


def plain(value):
    return str.__str__(value) if isinstance(value, str) else type(value)(plain(item) for item in value)


OPERATIONS = [
    lambda s, t: s + t,
    lambda s, t: t + s,
    lambda s, t: "AB" + s,
    lambda s, t: s + "AB",
    lambda s, t: s[1:-1],
    lambda s, t: s[::-1],
    lambda s, t: s[-3:2],
    lambda s, t: s[1:7:2],
    lambda s, t: s[:1],
    lambda s, t: list(s),
    lambda s, t: s.strip(),
    lambda s, t: s.lstrip("aA"),
    lambda s, t: s.rstrip("\nb"),
    lambda s, t: s.strip("abAB \n"),
    lambda s, t: s.removeprefix("A"),
    lambda s, t: s.removesuffix("a"),
    lambda s, t: s.split(),
    lambda s, t: s.split(None, 1),
    lambda s, t: s.split("a"),
    lambda s, t: s.split("aB", 1),
    lambda s, t: s.rsplit("A", 1),
    lambda s, t: s.rsplit(None, 1),
    lambda s, t: s.splitlines(),
    lambda s, t: s.splitlines(True),
    lambda s, t: s.partition("A"),
    lambda s, t: s.rpartition("a"),
    lambda s, t: s.replace("A", "BB"),
    lambda s, t: s.replace("a", "", 1),
    lambda s, t: s.replace("", "B", 2),
    lambda s, t: s.replace("aa", "A"),
    lambda s, t: replace_text(s, "A", t),
    lambda s, t: replace_text(s, "", t, 2),
    lambda s, t: repeat_text(s, 3),
    lambda s, t: repeat_text(s, 0),
]


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_operations_equal_those_of_str_and_keep_the_origins(number):
    operation = OPERATIONS[number]

    @settings(max_examples=40, deadline=None)
    @given(mixtures(), mixtures())
    def run(left, right):
        made = operation(left, right)
        assert plain(made) == plain(operation(plain(left), plain(right)))
        check(made)

    run()


@settings(deadline=None)
@given(st.lists(mixtures(), max_size=4), mixtures())
def test_joining_keeps_the_origins(parts, separator):
    made = join_text(parts, separator)
    assert plain(made) == plain(separator).join(map(plain, parts))
    check(made)


def test_very_many_repeats_and_replacements_count_as_the_callers():
    mixed = join_text(["A", CallerText("a")])
    many = "A" * 20_000 + mixed
    for made in (repeat_text(mixed, 20_000), replace_text(many, "A", "B"), replace_text(many, "", "B")):
        assert spans_of(made) == ((0, len(made)),)
    assert spans_of(repeat_text("A", 20_000)) == ()


def test_it_is_a_str_for_everyone_else():
    text = CallerText("abc")
    assert text == "abc"
    assert {text: 1}["abc"] == 1
    assert isinstance(str(text), CallerText)
    assert type(str.__str__(text)) is str
    assert text[1] == "b"
    with pytest.raises(IndexError):
        text[3]
    with pytest.raises(TypeError):
        text + 1
    with pytest.raises(TypeError):
        text["b"]
    with pytest.raises(ValueError, match="empty separator"):
        text.split("")


def test_marking_reaches_keys_and_nested_values_and_copies():
    source = {"a": ["b", {"c": ("d", 1, None, True)}]}
    made = mark(source)
    assert made == {"a": ["b", {"c": ["d", 1, None, True]}]}
    assert all(isinstance(key, CallerText) for key in made)
    assert isinstance(made["a"][1]["c"][0], CallerText)
    made["a"].append("x")
    assert source == {"a": ["b", {"c": ("d", 1, None, True)}]}


def test_what_can_carry_the_callers_words():
    assert carries_caller_text([{"A": (CallerText("a"),)}])
    assert carries_caller_text({CallerText("a"): 1})
    assert carries_caller_text(iter([]))
    assert not carries_caller_text(["A", 1, None, 2.5, True, {"B": []}])


def test_a_prompt_without_caller_text_has_no_spans():
    assert RenderedPrompt("AB").caller_spans == spans_of("AB") == ()
