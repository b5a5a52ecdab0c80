"""The documentation says what the code does: links, the tree of files, commands, settings, formats."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from hipfire.base.config_keys import KEYS
from hipfire.base.qtypes import BLOCKS, QType
from hipfire.checkpoint.ggml_types import GGML_BLOCKS
from hipfire.cli import main
from hipfire.cli.config import app as config_app
from hipfire.cli.config import show
from hipfire.cli.run import run
from hipfire.quantize.policy import RECIPES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hipfire"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TREE_LINE = re.compile(r"(?P<indent> *)(?P<name>\S+)(?: {2,}(?P<text>\S.*))?")


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere: to no file, or to no heading of it."""
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings get."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tree_paths(page: str) -> list[tuple[str, str]]:
    """Return (path, description) of every line of the fenced tree under the heading `The tree`."""
    block = page.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    folders: list[tuple[int, str]] = []
    found = []
    for line in block.splitlines():
        match = TREE_LINE.fullmatch(line)
        assert match is not None, line
        indent = len(match["indent"])
        folders = [folder for folder in folders if folder[0] < indent]
        path = "".join(name for _, name in folders) + match["name"]
        found.append((path, match["text"] or ""))
        if match["name"].endswith("/"):
            folders.append((indent, match["name"]))
    return found


def tree_faults(page: str, root: Path) -> list[str]:
    """Return what is wrong with the tree in a page: names without a file, files without a line or a word."""
    paths = tree_paths(page)
    listed = {path for path, _ in paths}
    package = root / "src" / "hipfire"
    faults = [f"{path} is not there" for path in sorted(listed) if not (root / path).exists()]
    faults += [f"{path} has no description" for path, text in paths if not text and path != "src/hipfire/"]
    for path in sorted(package.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir() and (path / "__init__.py").is_file() and f"{name}/" not in listed:
            faults.append(f"{name}/ is not in the tree")
        own = path.suffix in (".py", ".json") and (path.name != "__init__.py" or path.parent == package)
        if path.is_file() and own and name not in listed:
            faults.append(f"{name} is not in the tree")
    return faults


def flags(function: Callable[..., object]) -> Iterator[str]:
    """Yield the option names of a command's function; a dataclass marked "*" stands for its fields."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            yield from option_names(name, hints[name])


def option_names(name: str, hint: object) -> Iterator[str]:
    """Yield the option names of one parameter or field."""
    settings = [each for each in getattr(hint, "__metadata__", ()) if getattr(each, "name", None)]
    if settings and settings[0].name == ("*",):
        for field, inner in typing.get_type_hints(typing.get_args(hint)[0], include_extras=True).items():
            yield from option_names(field, inner)
    else:
        yield from settings[0].name if settings else [f"--{name.replace('_', '-')}"]


def section(page: str, title: str) -> str:
    """Return the text under a second-level heading, or "" if there is none."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def cli_page() -> str:
    return (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def formats_page() -> str:
    return (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_caught(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A title, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](#here) [c](other.md#a-title-with-code) [d](https://example.org/x)\n"
        "[e](missing.md) [f](other.md#none)\n```\n[g](in-code.md)\n```\n[h](#nowhere)\n"
    )
    assert broken_links(page) == ["missing.md", "other.md#none", "#nowhere"]


def test_the_tree_in_the_docs_is_the_tree_on_disk() -> None:
    assert tree_faults((ROOT / "docs" / "tree.md").read_text(encoding="utf-8"), ROOT) == []


def test_a_wrong_tree_is_caught(tmp_path: Path) -> None:
    package = tmp_path / "src" / "hipfire"
    for name in ("__init__.py", "base/__init__.py", "base/a.py", "base/b.py", "quant/__init__.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    tree = "src/hipfire/\n  __init__.py  names\n  base/  foundation\n    a.py\n    c.py  gone\n"
    assert tree_faults(f"## The tree\n\n```\n{tree}```\n", tmp_path) == [
        "src/hipfire/base/c.py is not there",
        "src/hipfire/base/a.py has no description",
        "src/hipfire/base/b.py is not in the tree",
        "src/hipfire/quant/ is not in the tree",
    ]


@pytest.mark.parametrize(("name", "target"), [(name, target) for name, target, _ in main.COMMANDS])
def test_command_has_a_section_with_all_its_flags(name: str, target: str) -> None:
    text = section(cli_page(), f"hipfire {name}")
    assert text
    assert all(f"hipfire {alias}" in text for alias in main.ALIASES.get(name, ()))
    module, _, attribute = target.partition(":")
    if attribute != "app":
        missing = [
            flag for flag in flags(getattr(import_module(module), attribute)) if f"`{flag}`" not in text
        ]
        assert missing == []


def test_flags_sees_both_spellings_of_a_flag() -> None:
    assert {"--temp", "-t", "--max-tokens", "-n", "--kv-mode", "--top-p", "--json"} <= set(flags(run))


def test_config_commands_are_described() -> None:
    text = section(cli_page(), "hipfire config")
    names = [name for name in config_app if not name.startswith("-")]
    assert {"get", "set", "explain"} <= set(names)
    assert [name for name in names if f"`hipfire config {name}" not in text] == []


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_setting_has_its_row(key: typing.Any) -> None:
    row = f"| `{key.name}` | `{key.flat}` | {show(key.default)} | {key.rule} | `{key.env}` |"
    assert row in section(cli_page(), "Settings").splitlines()


def test_environment_variables_are_described() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    used = set(re.findall(r"\bHIPFIRE_[A-Z_]+|\bHF_[A-Z_]{4,}|\bHUGGING_FACE_[A-Z_]+", sources))
    assert {"HIPFIRE_HOME", "HIPFIRE_DEBUG", "HF_TOKEN"} <= used
    assert sorted(name for name in used if f"`{name}`" not in cli_page()) == []


def test_exit_codes_are_described() -> None:
    text = section(cli_page(), "Exit codes")
    codes = [value for name, value in vars(main).items() if name.startswith("EXIT_")]
    assert len(codes) == 4
    assert all(f"\n| {code} | " in text for code in codes)


@pytest.mark.parametrize("qtype", QType, ids=lambda qtype: qtype.name)
def test_format_has_its_row(qtype: QType) -> None:
    block = BLOCKS[qtype]
    bits = 8 * block.nbytes / block.elements
    row = f"| {int(qtype)} | {qtype.name} | {block.elements} | {block.nbytes} | {bits:g} |"
    assert any(line.startswith(row) for line in section(formats_page(), "Weight formats").splitlines())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_has_its_row(recipe: typing.Any) -> None:
    formats = f"{recipe.matrix.name} | {recipe.ragged.name} | {recipe.embedding.name}"
    row = f"| {recipe.name} | {', '.join(recipe.aliases)} | {formats} |"
    assert row in section(formats_page(), "Which tensor gets which format").splitlines()


@pytest.mark.parametrize("name", [kind.name for kind in GGML_BLOCKS.values()])
def test_gguf_type_is_mentioned(name: str) -> None:
    assert re.search(rf"\b{name}\b", section(formats_page(), "GGUF types"))
