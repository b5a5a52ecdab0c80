import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipfire.text.normalize import normalize_prompt


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a\r\nb\r\n", "a\nb\n"),
        ("a\u00a0b", "a b"),
        ("a  \nb \u00a0", "a\nb"),
        ("a\n\n\n\n\nb", "a\n\nb"),
        ("a\n \n \n \nb", "a\n\nb"),
        ("  a\tb\t\n", "  a\tb\t\n"),
        ("a\rb", "a\rb"),
        ("", ""),
    ],
)
def test_each_rule(text, want):
    assert normalize_prompt(text) == want


@settings(deadline=None)
@given(st.text(alphabet="ab \u00a0\r\n\t"))
def test_twice_is_once_and_the_rules_hold(text):
    once = normalize_prompt(text)
    assert normalize_prompt(once) == once
    assert "\r\n" not in once
    assert "\u00a0" not in once
    assert "\n\n\n" not in once
    assert " \n" not in once
    assert not once.endswith(" ")
    assert [c for c in once if c in "ab\t"] == [c for c in text if c in "ab\t"]
