"""The words that a chat template can write: its text and its string literals, without code and comments.

This file knows Jinja's lexer and nothing about tokens or rendering.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from jinja2 import Environment
from jinja2.exceptions import TemplateSyntaxError

_WRITTEN: Final = frozenset({"data", "string"})
_BETWEEN: Final = "\0"


def template_words(sources: Iterable[str]) -> str:
    """Return what the templates can write, pieces kept apart by a NUL.

    Of a source that is not valid Jinja everything counts.
    """
    lexer = Environment().lexer
    pieces: list[str] = []
    for source in sources:
        try:
            found = [str(token.value) for token in lexer.tokenize(source) if token.type in _WRITTEN]
        except TemplateSyntaxError:
            found = [source]
        pieces += found
    return _BETWEEN.join(pieces)
