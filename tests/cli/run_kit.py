"""What the tests of `run` and `quantize` share: the Python API's answer, and the form of an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hipfire.base.sampling import GenerationParams
from hipfire.engine.llm import LLM
from hipfire.runtime.load import LoadOptions

LENGTH = 24
# without the command line's own default penalty
GREEDY = ("-t", "0", "--repeat-penalty", "1")


def answer(path: Path, text: str, *, raw: bool = False, length: int = LENGTH) -> str:
    """Return the greedy reply that the Python API gives, with the settings of the command line."""
    llm = LLM(path, LoadOptions())
    limit = GenerationParams(max_tokens=length)
    if raw:
        return llm.generate(text, None, limit).text
    return llm.chat([{"role": "user", "content": text}], None, limit).text


def one_line(shown: Any, *parts: str) -> None:
    """Check an error: nothing on stdout, one line on stderr with these parts, no traceback."""
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[-1].startswith("hipfire: ")
    assert all(part in lines[-1] for part in parts), lines[-1]
    assert "Traceback" not in shown.err
