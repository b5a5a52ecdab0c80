"""Jinja filters that chat templates expect in a form of their own, and what strings' own operations may cost.

The functions here keep the origin of characters (see origin.py). They know nothing about environments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jinja2 import Environment
from jinja2.filters import make_attrgetter
from jinja2.utils import pass_environment

from hipfire.text.budget import Budget
from hipfire.text.origin import CallerText, carries_caller_text, join_text, replace_text

# results of these string methods are cut out of the string, or made by this package
EXACT_METHODS: Final = frozenset(
    [
        "strip",
        "lstrip",
        "rstrip",
        "removeprefix",
        "removesuffix",
        "split",
        "rsplit",
        "splitlines",
        "partition",
        "rpartition",
    ]
)
# slow beyond any budget on long text, or different at every rendering
OMITTED_FILTERS: Final = frozenset({"urlize", "wordwrap", "pprint", "random"})
_SIZED: Final = frozenset(
    ["center", "ljust", "rjust", "zfill", "indent", "expandtabs", "batch", "slice", "round", "tojson"]
)
_ITERATING: Final = frozenset({"list", "batch", "slice", "sort", "unique", "join", "map", "groupby"})
ORDERING: Final = frozenset({"sort", "unique", "groupby", "min", "max", "dictsort"})
# these hand items on as they are, or are charged where they make their text
_TEXTLESS: Final = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "first",
        "items",
        "join",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sum",
    ]
)
_NUMBER: Final = re.compile(r"\d{1,18}")
_WIDTHS: Final = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\d{0,18})(?:\.(\d{1,18}))?")
_DIRECTIVE: Final = re.compile(r"(%s|%%)")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON for a prompt: nothing is escaped for HTML, letters stay letters."""
    pair = (separators[0], separators[1]) if separators is not None else None
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys, allow_nan=True
    )


def joined(budget: Budget, items: Sequence[str], separator: str) -> str:
    """Return the items joined by `separator`, charged before it is made."""
    budget.text(sum(map(len, items)) + len(separator) * len(items))
    return join_text(items, separator)


@pass_environment
def join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """Return the items of `value` as strings, joined by `d`."""
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    printed = environment.finalize or str
    budget: Budget = environment.budget  # type: ignore[attr-defined]
    return joined(budget, [str(printed(item)) for item in items], str(d))


@pass_environment
def replace(environment: Environment, s: Any, old: str, new: str, count: int | None = None) -> str:
    """Return `s` with `old` replaced by `new`, at most `count` times."""
    printed = environment.finalize or str
    return replace_text(str(printed(s)), str(old), str(printed(new)), -1 if count is None else count)


OWN_FILTERS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {"tojson": to_json, "join": join, "replace": replace}
)


def widths_of_spec(spec: str) -> list[int]:
    """Return the integers in a `str.format` specification: widths and precisions."""
    return [int(digits) for digits in _NUMBER.findall(spec)]


def widths_of_percent(template: str) -> list[int]:
    """Return the widths and precisions in a `%` format string."""
    return [int(digits) for pair in _WIDTHS.findall(template) for digits in pair if digits]


def charge(budget: Budget, name: str, subject: Any, arguments: Sequence[Any]) -> None:
    """Charge the string method or filter `name` for what it could make of `subject`, before it runs."""
    if name in _SIZED:
        budget.arguments(arguments)
    if name in ORDERING:
        budget.compared(subject)
    elif name == "tojson":
        budget.shown([subject], indent=max(map(_width, arguments), default=0))
    elif name not in _TEXTLESS and name != "format":
        budget.shown([subject, *arguments])
    if name == "join" and isinstance(arguments[0] if arguments else None, str):
        budget.items(len(arguments[0]))
    if not isinstance(subject, str):
        return
    if name in _ITERATING:
        budget.items(len(subject))
    elif name in ("split", "rsplit", "splitlines"):
        budget.items(_piece_count(subject, arguments))
    elif name == "replace" and len(arguments) >= 2:
        budget.text(len(subject) + subject.count(str(arguments[0])) * len(str(arguments[1])))
    elif name == "indent":
        budget.text(len(subject) + max([*map(_width, arguments), 4]) * (subject.count("\n") + 1))
    elif name == "expandtabs":
        budget.text(len(subject) + subject.count("\t") * max([*arguments, 8]))
    elif name == "translate":
        longest = max((len(str(value)) for value in _table(arguments)), default=1)
        budget.text(len(subject) * max(longest, 1))
    elif name == "format":
        _charge_percent(budget, subject, arguments)


def percent(budget: Budget, left: str, right: Any, printed: Callable[[Any], Any]) -> str:
    """Return `left % right`; where only %s occurs, each part keeps its origin."""
    values = right if isinstance(right, tuple) else (right,)
    _charge_percent(budget, left, values)
    parts = _DIRECTIVE.split(left)
    exact = not isinstance(left, CallerText) and not any("%" in part for part in parts[::2])
    if not exact or parts[1::2].count("%s") != len(values):
        made = left % right
        return CallerText(made) if any(map(carries_caller_text, (left, *values))) else made
    rest = iter(values)
    pieces = [str(printed(next(rest))) if part == "%s" else "%" if part == "%%" else part for part in parts]
    budget.text(sum(map(len, pieces)))
    return join_text(pieces)


def _charge_percent(budget: Budget, template: str, values: Sequence[Any]) -> None:
    """Charge for a `%` format: each directive may print any of the values."""
    budget.arguments([*widths_of_percent(template), *(values if "*" in template else ())])
    directives = template.count("%")
    budget.shown(values, copies=directives)
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    budget.text(len(template) + directives * longest)


def _width(value: Any) -> int:
    """Return how many characters an argument for indentation stands for."""
    return value if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _piece_count(subject: str, arguments: Sequence[Any]) -> int:
    """Return about how many pieces a split makes, never fewer for ordinary white space."""
    separator = arguments[0] if arguments and isinstance(arguments[0], str) and arguments[0] else None
    breaks = subject.count(separator) if separator else sum(map(subject.count, " \t\r\n"))
    limit = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], int) else -1
    return 1 + (breaks if limit < 0 else min(breaks, limit))


def _table(arguments: Sequence[Any]) -> Iterable[Any]:
    return arguments[0].values() if arguments and isinstance(arguments[0], Mapping) else ()
