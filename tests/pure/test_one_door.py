"""Layers, models and caches start every operation through the launcher: `kernels/launch.py` is the one door.

The check reads syntax trees. It sees names that are imported, functions of torch that are called, calls of
references and matrix products written with `@`. It cannot see arithmetic written with other operators.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "hipfire"
FOLDERS = ("layers", "models", "cache")
KERNELS = "hipfire.kernels"
TYPES = frozenset({"Experts", "Launcher", "LaunchRecord", "Op", "PackedMatrix", "Panels", "Spread"})
# functions that see no tensor
PLAIN_FUNCTIONS = frozenset({"attention_tiles"})
# functions that prepare weights once, at load
LOAD_FUNCTIONS = frozenset({"decay_of"})

# functions of torch that make, join or index tensors, or steer it; everything else is mathematics
TORCH_HELPERS = frozenset(
    {
        "arange", "cat", "device", "empty", "empty_like", "frombuffer", "from_numpy", "full", "full_like",
        "inference_mode", "no_grad", "ones", "stack", "tensor", "zeros", "zeros_like",
    }
)  # fmt: skip

# methods of tensors that do the work of an operation
TENSOR_MATHS = frozenset(
    {
        "addmm", "baddbmm", "bmm", "cos", "einsum", "erf", "exp", "log", "log_softmax", "logsumexp", "matmul",
        "mean", "mm", "mv", "relu", "rsqrt", "sigmoid", "sin", "softmax", "sqrt", "square", "tanh", "var",
    }
)  # fmt: skip

# standard library mathematics on plain numbers
PLAIN_MODULES = frozenset({"math"})


def door_faults(name: str, text: str) -> list[str]:
    """Return a line for every way around the door in a module's source."""
    tree = ast.parse(text)
    names = _torch_names(tree)
    found = [*_import_faults(tree), *_call_faults(tree, names)]
    return [f"{name}:{line}: {fault}" for line, fault in sorted(found)]


def _import_faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(KERNELS):
                    yield node.lineno, f"imports the module {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(KERNELS):
            for alias in node.names:
                if alias.name not in TYPES | PLAIN_FUNCTIONS | LOAD_FUNCTIONS and not alias.name.isupper():
                    yield node.lineno, f"imports {alias.name} from {node.module}"
        elif isinstance(node, ast.ImportFrom) and node.module == "hipfire":
            for alias in node.names:
                if alias.name == "kernels":
                    yield node.lineno, "imports the package of kernels"


def _torch_names(tree: ast.AST) -> dict[str, str]:
    """Return what the names of a module mean, for names that lead into torch."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _call_faults(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            yield node.lineno, "multiplies matrices with @"
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func)
        head, _, rest = called.partition(".")
        last = called.rpartition(".")[2]
        if last.endswith("_ref"):
            yield node.lineno, f"calls the reference {last}"
        elif head in names:
            full = f"{names[head]}.{rest}" if rest else names[head]
            if full.removeprefix("torch.") not in TORCH_HELPERS:
                yield node.lineno, f"calls {full}"
        elif rest and head not in PLAIN_MODULES and last.rstrip("_") in TENSOR_MATHS:
            yield node.lineno, f"calls the method {last}"


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of attributes; what is not a name at its start becomes `?`."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def modules() -> list[Path]:
    """Return the modules that the rule binds."""
    return sorted(path for folder in FOLDERS for path in (SOURCE / folder).rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_module_goes_through_the_door(path: Path) -> None:
    assert door_faults(str(path.relative_to(SOURCE)), path.read_text(encoding="utf-8")) == []


def test_the_modules_were_found() -> None:
    assert {path.parent.name for path in modules()} == set(FOLDERS)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from hipfire.kernels.linear import linear_ref\n", "imports linear_ref"),
        ("from hipfire.kernels.fwht import FWHT, fwht256\n", "imports fwht256"),
        ("from hipfire.kernels import linear\n", "imports linear"),
        ("import hipfire.kernels.linear\n", "imports the module hipfire.kernels.linear"),
        ("from hipfire import kernels\n", "imports the package"),
        ("def f(op, x):\n    return LINEAR.reference_ref(x)\n", "calls the reference"),
        ("import torch\ny = torch.matmul(a, b)\n", "calls torch.matmul"),
        ("import torch\ny = torch.softmax(a, -1)\n", "calls torch.softmax"),
        ("import torch as t\ny = t.nn.functional.linear(a, b)\n", "calls torch.nn.functional.linear"),
        ("import torch.nn.functional as F\ny = F.linear(a, b)\n", "calls torch.nn.functional.linear"),
        ("from torch.nn import functional as F\ny = F.silu(a)\n", "calls torch.nn.functional.silu"),
        ("from torch import einsum\ny = einsum('ij,jk', a, b)\n", "calls torch.einsum"),
        ("y = a @ b\n", "multiplies matrices"),
        ("a @= b\n", "multiplies matrices"),
        ("y = x.float().softmax(-1)\n", "calls the method softmax"),
        ("def f(x):\n    return self.q.tanh_()\n", "calls the method tanh_"),
    ],
)
def test_a_way_around_the_door_is_caught(text: str, fault: str) -> None:
    (found,) = door_faults("a.py", text)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "from hipfire.kernels.linear import DEQUANTIZE, LINEAR\n",
        "from hipfire.kernels.launch import Launcher, LaunchRecord, Op\n",
        "import torch\ny = torch.cat([a, torch.arange(3)]).view(-1).cumsum(0)\n",
        "import math\ny = math.sqrt(2.0) + math.exp(1.0)\n",
        "def f(step, x):\n    return step.launcher.run(LINEAR, x, w)\n",
    ],
)
def test_the_door_itself_and_helpers_pass(text: str) -> None:
    assert door_faults("a.py", text) == []
