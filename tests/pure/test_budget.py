"""Budgets that keep files and functions small, and imports at the top of their file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "hipfire"
FILE_LINES, KERNEL_FILE_LINES, FUNCTION_LINES = 300, 500, 60
LOCAL_IMPORT = "noqa: PLC0415"


def file_faults(name: str, text: str, limit: int) -> list[str]:
    """Return a line if the file has more than `limit` lines."""
    count = len(text.splitlines())
    return [f"{name}: {count} lines, allowed are {limit}"] if count > limit else []


def function_faults(name: str, text: str) -> list[str]:
    """Return a line for every function that is too long, from its `def` to its last line."""
    return [
        f"{name}:{node.lineno}: {node.name} has {length} lines, allowed are {FUNCTION_LINES}"
        for node in functions(ast.parse(text))
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def import_faults(name: str, text: str) -> list[str]:
    """Return a line for every import inside a function that is not marked, or gives no reason."""
    lines = text.splitlines()
    places = {
        node.lineno
        for function in functions(ast.parse(text))
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    faults = []
    for place in sorted(places):
        _, mark, reason = lines[place - 1].partition(LOCAL_IMPORT)
        if not mark:
            faults.append(f"{name}:{place}: import inside a function")
        elif not reason.strip(" -.:") and not has_comment_above(lines, place - 1):
            faults.append(f"{name}:{place}: import inside a function gives no reason")
    return faults


def has_comment_above(lines: list[str], index: int) -> bool:
    """Tell whether a comment stands above the group of local imports that line `index` belongs to."""
    while index > 0:
        index -= 1
        line = lines[index].strip()
        if line.startswith("#"):
            return True
        if line and LOCAL_IMPORT not in line:
            return False
    return False


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a module, methods and inner functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def sources() -> list[Path]:
    """Return the files of the package."""
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_file_keeps_its_budgets(path: Path) -> None:
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(SOURCE))
    limit = KERNEL_FILE_LINES if "kernels" in path.parts else FILE_LINES
    assert file_faults(name, text, limit) + function_faults(name, text) + import_faults(name, text) == []


def test_the_package_was_found() -> None:
    assert {"base", "kernels", "cli"} <= {path.parent.name for path in sources()}


def test_a_long_file_is_caught() -> None:
    assert file_faults("a.py", "x = 1\n" * 300, FILE_LINES) == []
    assert file_faults("a.py", "x = 1\n" * 301, FILE_LINES) == ["a.py: 301 lines, allowed are 300"]


@pytest.mark.parametrize("head", ["def long():\n", "async def long():\n", "class C:\n  def long(self):\n"])
def test_a_long_function_is_caught(head: str) -> None:
    body = "    x = 1\n"
    assert function_faults("a.py", head + body * 59) == []
    (fault,) = function_faults("a.py", head + body * 60)
    assert "long has 61 lines" in fault


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import torch\n",
        "def f():\n    from torch import nn  # noqa: F401\n",
        "class C:\n    def f(self):\n        if True:\n            import torch\n",
        "def f():\n    def g():\n        import torch\n",
    ],
)
def test_an_import_inside_a_function_is_caught(text: str) -> None:
    (fault,) = import_faults("a.py", text)
    assert "import inside a function" in fault


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import torch  # noqa: PLC0415\n",
        "def f():\n    # about the next line only\n    x = 1\n    import torch  # noqa: PLC0415\n",
    ],
)
def test_a_marked_import_without_a_reason_is_caught(text: str) -> None:
    (fault,) = import_faults("a.py", text)
    assert "gives no reason" in fault


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n",
        "if TYPE_CHECKING:\n    import torch\n",
        "def f():\n    import torch  # noqa: PLC0415 - slow to import\n",
        "def f():\n    # slow\n    import torch  # noqa: PLC0415\n\n    import gguf  # noqa: PLC0415\n",
    ],
)
def test_imports_that_are_in_order_pass(text: str) -> None:
    assert import_faults("a.py", text) == []
