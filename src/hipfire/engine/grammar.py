"""Replies that follow a JSON schema: which tokens may come next, as llguidance says.

This file knows token ids and schemas. It does not know channels: whoever tells reasoning from the answer asks
only for the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from hipfire.base.errors import InternalError, ValidationError
from hipfire.base.printable import one_line
from hipfire.text.tokenizer import Tokenizer

Mask = NDArray[np.bool_]

# JSON may have any amount of white space between its parts, and a weak model writes it for ever
_WHITE_SPACE: Final = r"[ \n\t]{0,20}"
_ANY_OBJECT: Final = {"type": "object"}
_MOST_SAID: Final = 300


class _Spellings:
    """A tokenizer in the form that llguidance wants."""

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_id
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(number) for number in ids]
        self.special_token_ids = [number for number in ids if tokenizer.is_special(number)]

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_bos=False)


class GrammarFactory:
    """Makes the matchers of one model's vocabulary. `end_ids` are the tokens that end a turn."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int]) -> None:
        ends = sorted(end for end in end_ids if end < tokenizer.vocab_size)
        if not ends:
            raise ValidationError(
                "this model has no end token, which replies of a given format need",
                hint="leave response_format out",
            )
        self._size = tokenizer.vocab_size
        wrapper = TokenizerWrapper(_Spellings(tokenizer, ends))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=self._size, eos_token=ends)

    def matcher(self, schema: Mapping[str, Any] | None) -> Grammar:
        """Return the matcher of one reply: JSON that follows `schema`, or any JSON object for None.

        Raises ValidationError for a schema that is not valid or has keywords that cannot be enforced.
        """
        try:
            text = json.dumps(_ANY_OBJECT if schema is None else schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValidationError(f"the JSON schema is not JSON: {error}") from error
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITE_SPACE})
        except ValueError as error:
            raise _refusal(str(error), "nest it less deeply") from error
        fault = LLMatcher.validate_grammar(grammar, self._tokenizer)
        if fault:
            raise _refusal(fault, "leave out keywords that are not supported")
        made = Grammar(LLMatcher(self._tokenizer, grammar), self._size)
        if not made.possible:
            raise _refusal("no text fits it", "look for a reference that leads to itself")
        return made


class Grammar:
    """Where one reply is in its format."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size

    @property
    def possible(self) -> bool:
        """Say whether any token at all may come next."""
        self._matcher.compute_bitmask()
        return not (self._matcher.is_error() or self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Say whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Mask:
        """Return which tokens may come next, [vocab_size]; end tokens among them where the reply may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._size, bitorder="little").astype(np.bool_)

    def take(self, token: int) -> None:
        """Note the token that was chosen; InternalError if it was not allowed."""
        if not self._matcher.consume_token(token):
            self._check()
            raise InternalError(f"token {token} does not fit the reply's format")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InternalError(f"the reply's format cannot be followed: {self._matcher.get_error()}")


def _refusal(fault: str, hint: str) -> ValidationError:
    """Return the error for a schema; what the library says may quote a pattern of any length."""
    return ValidationError(f"the JSON schema cannot be followed: {one_line(fault)[:_MOST_SAID]}", hint=hint)
