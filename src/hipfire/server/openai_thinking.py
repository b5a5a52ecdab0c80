"""Thinking in OpenAI's API: the many names by which clients ask for its mode, its effort and its cap.

Plain functions of the request's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hipfire.engine.turn import Thinking
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields

MAX_CAP = 393_216
# most tokens of one span by name; 0 is no bound
BUDGETS = {
    "low": 512,
    "med": 2048,
    "medium": 2048,
    "high": 8192,
    "xhigh": 24_576,
    "max": 32_768,
    "uncapped": 0,
}
EFFORTS = ("auto", "none", "minimal", "low", "medium", "high", "xhigh", "max")
_MODES = {"on": True, "enabled": True, "off": False, "disabled": False, "adaptive": None, "auto": None}


class _Axes:
    """The three axes, each filled once: a request must not say two things about one."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._by: dict[str, str] = {}

    def put(self, axis: str, value: Any, where: str) -> None:
        """Take a value from the field `where`; FieldError if another field has said otherwise."""
        if axis in self.values and self.values[axis] != value:
            raise FieldError(where, f"{where} and {self._by[axis]} contradict each other", hint="give one")
        self.values[axis], self._by[axis] = value, where

    def thinking(self) -> Thinking:
        """Return the axes."""
        return Thinking(**self.values)


def read_thinking(fields: Fields) -> tuple[Thinking, Mapping[str, Any], bool]:
    """Return the axes, further names for the template, and whether reasoning is to stand in the content too.

    Raises FieldError for wrong types, numbers out of range, and fields that contradict one another.
    """
    axes = _Axes()
    arguments, inline = _template_arguments(fields, axes)
    _mode(fields, "thinking", axes)
    if (enabled := fields.flag("enable_thinking")) is not None:
        axes.put("enabled", enabled, "enable_thinking")
    _effort(fields, "reasoning_effort", axes)
    _cap(fields, "max_think_tokens", axes)
    _budget(fields, "thinking_budget", axes)
    if (reasoning := fields.part("reasoning")) is not None:
        if (enabled := reasoning.flag("enabled")) is not None:
            axes.put("enabled", enabled, "reasoning.enabled")
        _effort(reasoning, "effort", axes)
        _cap(reasoning, "max_tokens", axes)
        _budget(reasoning, "budget", axes)
        reasoning.finish()
    return axes.thinking(), arguments, inline


def _template_arguments(fields: Fields, axes: _Axes) -> tuple[dict[str, Any], bool]:
    given = fields.part("chat_template_kwargs")
    if given is None:
        return {}, False
    if (enabled := given.flag("enable_thinking")) is not None:
        axes.put("enabled", enabled, "chat_template_kwargs.enable_thinking")
    _effort(given, "reasoning_effort", axes)
    inline = given.flag("preserve_thinking") or False
    taken = ("enable_thinking", "reasoning_effort")
    values: Mapping[str, Any] = fields.get("chat_template_kwargs")
    return {key: value for key, value in values.items() if key not in taken and value is not None}, inline


def _mode(fields: Fields, name: str, axes: _Axes) -> None:
    value = fields.get(name)
    if value is None:
        return
    where = fields.where(name)
    if isinstance(value, Mapping):
        part = Fields(value, where)
        word = part.choice("type", tuple(_MODES))
        if word is None:
            raise part.fault("type", f"one of {', '.join(_MODES)}")
        _cap(part, "budget_tokens", axes)
        part.finish()
        value = word
    elif not isinstance(value, bool) and not (isinstance(value, str) and value in _MODES):
        raise fields.fault(name, f"a boolean or one of {', '.join(_MODES)}")
    enabled = value if isinstance(value, bool) else _MODES[value]
    if enabled is not None:
        axes.put("enabled", enabled, where)


def _effort(fields: Fields, name: str, axes: _Axes) -> None:
    word = fields.choice(name, EFFORTS)
    if word == "none":
        axes.put("enabled", False, fields.where(name))
    elif word is not None and word != "auto":
        # no template knows "minimal"
        axes.put("effort", "low" if word == "minimal" else word, fields.where(name))


def _cap(fields: Fields, name: str, axes: _Axes) -> None:
    if (cap := fields.integer(name, 0, MAX_CAP)) is not None:
        axes.put("cap", cap, fields.where(name))


def _budget(fields: Fields, name: str, axes: _Axes) -> None:
    value = fields.get(name)
    if value is None:
        return
    if isinstance(value, int) and not isinstance(value, bool):
        _cap(fields, name, axes)
    elif value == "off":
        axes.put("enabled", False, fields.where(name))
    elif isinstance(value, str) and value in BUDGETS:
        # a number that is given as well is the more exact wish
        if "cap" not in axes.values:
            axes.put("cap", BUDGETS[value], fields.where(name))
    else:
        raise fields.fault(name, f"an integer, off or one of {', '.join(BUDGETS)}")
