"""Every Triton kernel is compiled by the gate and named by a test of what a GPU computes.

A kernel is a function of Triton's that no other one calls, or that is launched. A test names it by its own
name, by that of a function that starts it, or by that of an operation which such a function implements. The
check reads syntax trees, and `OFFLINE` tuples as they are.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import hipfire.kernels
import hipfire.kernels.gpu
from hipfire.kernels.launch import Op

TESTS = Path(__file__).parents[1] / "gpu"
# what only the gate reads, and so nobody starts a kernel with
GATE = "OFFLINE"


def parts(text: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions, classes and variables of a module by name."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, node


def identifiers(tree: ast.AST) -> set[str]:
    """Return all names that are read in a tree, attributes and imported names among them."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def is_jit(node: ast.stmt) -> bool:
    """Tell whether a statement defines a function of Triton's."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any("jit" in identifiers(decorator) for decorator in decorators)


def launched(tree: ast.AST) -> set[str]:
    """Return the names that are first arguments of a method `launch`."""
    return {
        node.args[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "launch"
        and node.args
        and isinstance(node.args[0], ast.Name)
    }


def kernels(modules: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return the kernels of modules, given by name with their text, as pairs of module and name."""
    functions = {
        (name, part): node for name, text in modules.items() for part, node in parts(text) if is_jit(node)
    }
    called = {name for (_, own), node in functions.items() for name in identifiers(node) - {own}}
    started = set().union(*(launched(ast.parse(text)) for text in modules.values()))
    return {(module, name) for module, name in functions if name in started or name not in called}


def untested(modules: Mapping[str, str], operations: Mapping[str, str], tests: Iterable[str]) -> set[str]:
    """Return the kernels that no test names; `operations` gives the function behind each operation's name."""
    users: dict[str, set[str]] = {}
    for text in modules.values():
        for part, node in parts(text):
            for name in identifiers(node) - {part}:
                users.setdefault(name, set()).add(part)
    for operation, function in operations.items():
        users.setdefault(function, set()).add(operation)
    named = set().union(*(identifiers(ast.parse(text)) for text in tests)) - {GATE}
    return {name for _, name in kernels(modules) if not _reached(name, users) & named}


def _reached(name: str, users: Mapping[str, set[str]]) -> set[str]:
    found, waiting = {name}, [name]
    while waiting:
        fresh = users.get(waiting.pop(), set()) - found - {GATE}
        found |= fresh
        waiting += fresh
    return found


def gpu_modules() -> dict[str, str]:
    """Return the text of every module of GPU kernels, by name."""
    folder = Path(hipfire.kernels.gpu.__path__[0])
    return {f"hipfire.kernels.gpu.{path.stem}": path.read_text() for path in sorted(folder.glob("*.py"))}


def test_every_kernel_has_an_offline_entry() -> None:
    entries = [
        entry
        for name in gpu_modules()
        if not name.endswith("__init__")
        for entry in getattr(importlib.import_module(name), GATE, ())
    ]
    compiled = {(entry.function.__module__, entry.function.__name__) for entry in entries}
    assert kernels(gpu_modules()) - compiled == set()


def test_every_kernel_is_named_by_a_test() -> None:
    operations: dict[str, str] = {}
    for module in pkgutil.iter_modules(hipfire.kernels.__path__):
        if module.ispkg:
            continue
        for name, value in vars(importlib.import_module(f"hipfire.kernels.{module.name}")).items():
            if isinstance(value, Op) and "triton" in value.kernels:
                operations[name] = value.kernels["triton"].rpartition(".")[2]
    tests = [path.read_text() for path in TESTS.rglob("*.py")]
    assert untested(gpu_modules(), operations, tests) == set()


SOURCE = """
import triton
_HELPERS = 3
@triton.jit
def helper(x):
    return x + 1
@triton.jit
def both_kernel(x_ptr):
    helper(x_ptr)
@triton.jit
def first_kernel(x_ptr):
    both_kernel(x_ptr)
@triton.jit
def second_kernel(x_ptr):
    helper(x_ptr)
TABLE = {2: second_kernel}
def start(engine):
    engine.launch(both_kernel, (1,))
def first(engine):
    engine.launch(first_kernel, (1,))
    start(engine)
def second(engine):
    engine.launch(TABLE[2], (1,))
OFFLINE = (first_kernel, second_kernel)
"""
MODULES = {"a": SOURCE}


def test_helpers_are_no_kernels_unless_they_are_launched() -> None:
    assert kernels(MODULES) == {("a", "both_kernel"), ("a", "first_kernel"), ("a", "second_kernel")}


def test_a_kernel_without_a_test_is_found() -> None:
    operations = {"FIRST": "first", "SECOND": "second"}
    everything = {"both_kernel", "first_kernel", "second_kernel"}
    assert untested(MODULES, operations, ["from a import OFFLINE\n"]) == everything
    assert untested(MODULES, operations, ["launcher.run(FIRST, x)\n"]) == {"second_kernel"}
    assert untested(MODULES, operations, ["a.start(engine)\n", "from a import second\n"]) == {"first_kernel"}
    assert untested(MODULES, operations, ["launcher.run(FIRST, x)\nlauncher.run(SECOND, x)\n"]) == set()
