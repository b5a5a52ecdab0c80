"""The Jinja environment of chat templates: sandboxed, budgeted, and keeping track of who wrote what.

One environment serves one rendering, so that renderings in several threads share nothing. Results of
operations that this file cannot follow count as the caller's text whenever any caller's text went in: that
way a lost record can make a control token ordinary, but never an ordinary text a control token. It knows no
tokens and no messages.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import update_wrapper
from types import CodeType
from typing import Any, Final, NoReturn

from jinja2 import Environment, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hipfire.text.budget import Budget
from hipfire.text.filters import (
    EXACT_METHODS,
    OMITTED_FILTERS,
    ORDERING,
    OWN_FILTERS,
    charge,
    joined,
    percent,
    widths_of_spec,
)
from hipfire.text.origin import CallerText, carries_caller_text, join_text, repeat_text, replace_text

_KEEPS_ORIGIN: Final = "_keeps_origin"
_FIELD_NAME: Final = re.compile(r"[^.\[]+")


class _Generator(CodeGenerator):
    """Code in which `~` goes through the environment and rounds of loops and macros are charged."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write a call of `TemplateEnvironment.text_join`."""
        self.write("environment.text_join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        """Write the charge for one round where `compile_source` put it."""
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.writeline("environment.budget.step()", node)
        else:
            super().visit_ExprStmt(node, frame)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is a plain block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose every loop round, call, filter and growing operator is charged to `budget`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            finalize=self.printed,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.budget = budget
        self.filters = {
            name: self._guarded(name, function)
            for name, function in {**FILTERS, **OWN_FILTERS}.items()
            if name not in OMITTED_FILTERS
        }
        # the two tests that make a text of their value
        tests: dict[str, Any] = {**self.tests}
        self.tests = {**tests, **{name: self._guarded(name, tests[name]) for name in ("lower", "upper")}}
        self.globals = {name: value for name, value in self.globals.items() if name != "lipsum"}
        self.globals["range"] = self._range

    def compile_source(self, source: str) -> CodeType:
        """Return the code object of a template; raises Jinja's TemplateSyntaxError."""
        tree = self.parse(source)
        blocks: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for block in blocks:
            block.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("budget"), lineno=block.lineno))
        return self.compile(tree)

    def concat(self, parts: Iterable[str]) -> str:
        """Return rendered pieces as one string."""
        pieces = list(parts)
        self.budget.text(sum(map(len, pieces)))
        return join_text(pieces)

    def text_join(self, parts: Iterable[Any]) -> str:
        """Return the operands of a `~` expression as one string."""
        return self.concat(str(self.printed(part)) for part in parts)

    def printed(self, value: Any) -> Any:
        """Return what `{{ value }}` prints, marked when it shows a container with the caller's words."""
        if isinstance(value, str):
            return value
        self.budget.shown([value])
        return self._settled(str(value), [value])

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse access to an unsafe attribute at once."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `callee` for the template."""
        self.budget.step()
        if isinstance(callee, Macro | LoopContext | BlockReference) or hasattr(callee, _KEEPS_ORIGIN):
            return super().call(context, callee, *args, **kwargs)
        owner = getattr(callee, "__self__", None)
        if owner is not None and not isinstance(owner, str | bytes | bytearray):
            return super().call(context, callee, *args, **kwargs)
        inputs = [*args, *(value for name, value in kwargs.items() if not name.startswith("_"))]
        if owner is None:
            self.budget.shown(() if isinstance(callee, type) else inputs)
            return self._settled(super().call(context, callee, *args, **kwargs), inputs)
        name = callee.__name__
        charge(self.budget, name, owner, inputs)
        if not isinstance(owner, str):
            return self._settled(super().call(context, callee, *args, **kwargs), [owner, *inputs])
        if name == "join" and len(args) == 1:
            return joined(self.budget, list(args[0]), owner)
        if name == "replace" and len(args) in (2, 3):
            return self._counted(replace_text(owner, *args))
        made = super().call(context, callee, *args, **kwargs)
        return self._counted(made) if name in EXACT_METHODS else self._settled(made, [owner, *inputs])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can make its operands grow, after checking by how much."""
        self.budget.step()
        if operator == "%" and isinstance(left, str):
            return percent(self.budget, left, right, self.printed)
        if operator == "*":
            return self._times(left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.budget.text(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            self.budget.items(len(left) + len(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.budget.integer(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe `str.format` that formats field by field, so that literal parts keep their origin."""
        whole = super().wrap_str_format(value)
        if whole is None:
            return None
        template: str = value.__self__
        by_field = value.__name__ == "format"

        def formatted(*args: Any, **kwargs: Any) -> str:
            parts = list(string.Formatter().parse(template))
            specs = [spec or "" for _, _, spec, _ in parts]
            if any("{" in spec for spec in specs):
                raise SecurityError("format specifications inside format specifications are not allowed")
            self.budget.arguments(width for spec in specs for width in widths_of_spec(spec))
            if not by_field:
                self.budget.shown([*args, *kwargs.values()], copies=len(parts))
                return str(self._settled(whole(*args, **kwargs), [template, *args]))
            return self.concat(self._fields(parts, isinstance(template, CallerText), args, kwargs))

        setattr(update_wrapper(formatted, whole), _KEEPS_ORIGIN, True)
        return formatted

    def _fields(
        self, parts: Sequence[Any], from_caller: bool, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterable[str]:
        """Yield the literal and the formatted parts of a `str.format` template in turn."""
        automatic = 0
        for literal, field, spec, conversion in parts:
            self.budget.step()
            yield CallerText(literal) if from_caller else literal
            if field is None:
                continue
            if field == "" or field[0] in ".[":
                field, automatic = f"{automatic}{field}", automatic + 1
            options = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            single = "{" + field + options + "}"
            safe = super().wrap_str_format(single.format)
            if safe is not None:
                name = _FIELD_NAME.match(field)
                root = name.group() if name is not None else ""
                value = args[int(root)] if root.isdecimal() else kwargs.get(root)
                self.budget.shown([value])
                yield self._settled(safe(*args, **kwargs), [value])

    def _settled(self, made: Any, inputs: Sequence[Any]) -> Any:
        """Return the result of an operation on `inputs`, charged, and marked where its origin was lost."""
        self._counted(made)
        if not isinstance(made, str) or isinstance(made, CallerText):
            return made
        if any(made is value for value in inputs):
            return made
        lost = any(carries_caller_text(value) for value in inputs if not isinstance(value, Undefined))
        return CallerText(made) if lost else made

    def _counted(self, made: Any) -> Any:
        if isinstance(made, str):
            self.budget.text(len(made))
        elif isinstance(made, list | tuple):
            self.budget.items(len(made))
        return made

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that is charged and whose result keeps or is given its origin."""
        exact = name in OWN_FILTERS and name != "tojson"

        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            if name in ORDERING:
                args = tuple(self._counted(list(arg)) if isinstance(arg, Iterator) else arg for arg in args)
            values = [arg for arg in args if not isinstance(arg, Context | Environment | EvalContext)]
            if name == "sum" and not isinstance(kwargs.get("start", [0, 0, *values[2:]][-1]), int | float):
                raise SecurityError("sum of anything but numbers is not allowed")
            charge(self.budget, name, values[0] if values else None, [*values[1:], *kwargs.values()])
            made = function(*args, **kwargs)
            return self._counted(made) if exact else self._settled(made, [*values, *kwargs.values()])

        return update_wrapper(guarded, function)

    def _times(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            self.budget.integer(left.bit_length() + right.bit_length())
            return left * right
        for sequence, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(sequence, str):
                self.budget.text(len(sequence) * max(count, 0))
                return repeat_text(sequence, count)
            if isinstance(count, int) and isinstance(sequence, list | tuple):
                self.budget.items(len(sequence) * max(count, 0))
        return left * right

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        try:
            self.budget.rounds(len(numbers))
        except OverflowError:
            self.budget.rounds(sys.maxsize)
        return numbers
