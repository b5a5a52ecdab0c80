"""The process that compiles kernels: `python -m hipfire.validate.compile_gate_worker PACKAGE`.

It lists the entries of all `OFFLINE` tuples in the package as one line of JSON, then compiles what it is
asked for, one line for one. A compiler's fault may end it; whoever asked notices. It judges no figures.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from hipfire.base.errors import HipfireError
from hipfire.kernels.gpu.offline import TARGETS, TRITON_VERSION, Offline, OfflineTarget, tool
from hipfire.validate.compile_gate_addresses import wide_faults
from hipfire.validate.compile_gate_results import read_resources, resource_faults


def main() -> int:
    """Serve the requests on standard input until it ends."""
    # compilers print too: what they print must not come between the answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)
    return 0


def serve(package: str, requests: TextIO, answers: TextIO) -> None:
    """Answer with the list of entries, then to each request `{"key": ..., "target": ...}`."""
    broken: dict[str, str] = {}
    entries: dict[str, Offline] = {}
    for name in _modules(package):
        try:
            for entry in getattr(importlib.import_module(name), "OFFLINE", ()):
                key = f"{name.rpartition('.')[2]}.{entry.label}"
                if key in entries:
                    broken[key] = "two entries have this name"
                entries[key] = entry
        except Exception as error:
            broken[name] = f"cannot be imported: {_said(error)}"
    listed = {
        key: [target.name for target in TARGETS.values() if entry.runs_on(target)]
        for key, entry in entries.items()
    }
    _answer(answers, {"triton": TRITON_VERSION, "entries": listed, "broken": broken})
    for line in requests:
        request = json.loads(line)
        _answer(answers, compile_entry(entries[request["key"]], TARGETS[request["target"]]))


def compile_entry(entry: Offline, target: OfflineTarget) -> dict[str, Any]:
    """Return what an entry needs on a machine and all that is wrong with it, as JSON values."""
    started = time.monotonic()
    try:
        compiled = entry.compile(target)
    except Exception as error:
        return {"faults": [f"does not compile: {_said(error)}"], "seconds": time.monotonic() - started}
    assembly = compiled.asm
    try:
        resources = read_resources(
            target.backend, assembly, compiled.metadata.shared, entry.needs, tool("cuobjdump")
        )
        faults = resource_faults(resources, target.shared, entry.needs) + wide_faults(str(assembly["ttir"]))
    except (HipfireError, OSError, subprocess.SubprocessError) as error:
        return {"faults": [f"cannot be checked: {_said(error)}"], "seconds": time.monotonic() - started}
    return {
        "registers": resources.registers,
        "spills": resources.spills,
        "scratch": resources.scratch,
        "shared": resources.shared,
        "instructions": resources.instructions,
        "scalar_spills": resources.scalar_spills,
        "faults": faults,
        "seconds": time.monotonic() - started,
    }


def _modules(package: str) -> Iterator[str]:
    """Yield the modules of a package by name, or the one module that it is."""
    found = importlib.import_module(package)
    if not hasattr(found, "__path__"):
        yield package
        return
    for module in pkgutil.iter_modules(found.__path__):
        yield f"{package}.{module.name}"


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _said(error: BaseException) -> str:
    """Return an error with its type and what it wraps, in one line."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return said if error.__cause__ is None else f"{said} because of {_said(error.__cause__)}"


if __name__ == "__main__":
    sys.exit(main())
