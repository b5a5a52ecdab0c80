"""`hipfire version`: this package, Python, and the libraries that do the work."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

from cyclopts import Parameter

from hipfire import __version__
from hipfire.base.config import SCHEMA_VERSION
from hipfire.cli.output import write, write_json

LIBRARIES = ("torch", "triton", "numba", "numpy", "tokenizers", "gguf", "huggingface-hub")


def version(*, as_json: Annotated[bool, Parameter(name=["-j", "--json"], negative="")] = False) -> None:
    """Show versions; `hipfire --version` is the short form.

    Parameters
    ----------
    as_json
        Write JSON.
    """
    if as_json:
        facts = {"hipfire": __version__, "config_schema": SCHEMA_VERSION, "python": platform.python_version()}
        write_json(facts | {"libraries": library_versions()})
        return
    write(f"hipfire {__version__}")
    write(f"python {platform.python_version()}")
    for name, found in library_versions().items():
        write(f"{name} {found or 'not installed'}")


def library_versions() -> dict[str, str | None]:
    """Return the installed version of each library, read from its metadata without importing it."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
