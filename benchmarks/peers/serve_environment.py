"""What llama-cpp-python's own server needs beside the package: added to the peer's environment if missing.

This file does not build the package. `pip install llama-cpp-python[server]` would build it once more in an
environment that has another version of it; here only the other packages of that extra are installed, from
wheels.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from hipfire.base.errors import UnsupportedError
from hipfire.base.printable import one_line
from peers.worker import worker_environment

SERVER = "llama_cpp.server"
# as the package's own extra `server` lists them
REQUIREMENTS = (
    *("uvicorn>=0.22.0", "fastapi>=0.100.0", "pydantic-settings>=2.0.1", "sse-starlette>=1.6.1"),
    *("starlette-context>=0.3.6,<0.4", "PyYAML>=5.1"),
)
_CHECK = f"import {SERVER}.app, uvicorn"


def add_server(python: Path, tell: Callable[[str], None]) -> None:
    """Make sure that the environment of `python` can run the server; `tell` gets a line before it installs.

    Raises UnsupportedError if pip fails, or if the server cannot be imported even then.
    """
    if not _failure([str(python), "-c", _CHECK]):
        return
    tell(f"installing what {SERVER} needs")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    fault = _failure([*pip, "--only-binary", ":all:", *REQUIREMENTS])
    if fault:
        raise UnsupportedError(
            f"pip could not install what {SERVER} needs: {fault}", hint="it needs access to the package index"
        )
    fault = _failure([str(python), "-c", _CHECK])
    if fault:
        raise UnsupportedError(
            f"{SERVER} cannot be used: {fault}", hint="name another environment with --peer-env"
        )


def _failure(command: Sequence[str]) -> str:
    """Run a program; return the last line of what it said if it failed, else nothing."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=worker_environment(own=False)
    )
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return one_line(last[0])
