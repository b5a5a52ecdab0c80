"""How answers are drawn: when at all, which blocks are complete, and that nothing is lost."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hipfire.cli.chat_view import MarkdownView, draws, split_blocks


@pytest.mark.parametrize(
    ("environment", "drawn"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "CLICOLOR": "0"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_terminal_is_drawn_on_unless_it_is_told_otherwise(
    environment: dict[str, str], drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert draws(environment) is False
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert draws(environment) is drawn


MARKDOWN = """\
# Title

A paragraph
of two lines.

- one

    still one
- two

```python
x = 1

y = 2
```
~~~
```

not the end
~~~

Last"""


def test_complete_blocks_are_cut_off() -> None:
    done, rest = split_blocks(MARKDOWN)
    assert rest == "Last"
    assert split_blocks(done[:-1])[1].startswith("```python\nx = 1\n\ny = 2")
    # the list goes on while lines are indented
    before = MARKDOWN[: MARKDOWN.index("    still")]
    assert split_blocks(before)[1] == "- one\n\n"


@given(st.lists(st.integers(0, len(MARKDOWN)), max_size=12))
def test_blocks_are_the_same_however_the_text_comes(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(MARKDOWN)]
    shown, held = [], ""
    for start, end in itertools.pairwise(cuts):
        done, held = split_blocks(held + MARKDOWN[start:end])
        shown.append(done)
    assert "".join(shown) + held == MARKDOWN
    # whatever is cut off ends where a block of the whole text ends
    whole = split_blocks(MARKDOWN)[0]
    assert "".join(shown) == whole
    assert all(split_blocks(part + "x")[0] == part for part in shown if part)


def test_drawn_markdown_has_all_of_a_long_block() -> None:
    out = io.StringIO()
    view = MarkdownView(Console(file=out, force_terminal=True, width=40, height=5), reasoning=False)
    words = [f"word{number}" for number in range(60)]
    for word in words:
        view.answer(f"{word} ")
    view.close()
    last = out.getvalue().rpartition("word0 ")[2]
    assert [word for word in words[1:] if word not in last] == []
