"""`hipfire diag`: what a bug report needs to say about the machine, the installation and the settings."""

from __future__ import annotations

import platform
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from hipfire import __version__
from hipfire.base import env
from hipfire.base.config import Config, load_config
from hipfire.base.config_keys import KEYS
from hipfire.base.errors import HipfireError
from hipfire.checkpoint.library import open_library
from hipfire.cli import host
from hipfire.cli.config import show
from hipfire.cli.output import size_text, write_fields, write_json
from hipfire.cli.serving import find_server
from hipfire.cli.version import library_versions

LOW_DISK_BYTES = 2 << 30


def diag(*, as_json: Annotated[bool, Parameter(name=["-j", "--json"], negative="")] = False) -> None:
    """Describe this machine and installation. Never fails because of what it finds.

    Parameters
    ----------
    as_json
        Write JSON.
    """
    facts = collect()
    if as_json:
        write_json(facts)
    else:
        write_fields(_readable(facts))


def collect() -> dict[str, Any]:
    """Return all facts as plain data; sizes are bytes."""
    problems: list[str] = []
    settings: list[str] = []
    models: list[dict[str, Any]] = []
    registry = "unknown"
    server: dict[str, Any] | None = None
    try:
        config = load_config()
        problems.extend(config.warnings)
        settings = _changed(config, problems)
        library = open_library(config)
        registry = library.registry.source
        models = [
            {
                "name": model.name,
                "format": model.format,
                "size_bytes": model.nbytes(),
                "path": str(model.path),
            }
            for model in library.scan()
        ]
        server = _server(config)
    except HipfireError as error:
        problems.append(error.line())
    facts: dict[str, Any] = {
        "hipfire": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": host.platform_name(),
        "cpu": host.cpu_facts(),
        "memory": host.memory_facts(),
        "libraries": library_versions(),
        "gpus": host.gpu_facts(),
        "kernels": _kernels(problems),
        **_folders(problems),
        "registry": registry,
        "models": models,
        "settings": settings,
        "server": server,
    }
    return facts | {"advice": [*problems, *_advice(facts)]}


def _kernels(problems: list[str]) -> dict[str, str | None]:
    """Return the instructions that CPU kernels are built from, and where they are kept compiled."""
    # the compiler takes half a second to import
    from hipfire.kernels.cpu.cache import cache_folder  # noqa: PLC0415
    from hipfire.kernels.cpu.target import cpu_path  # noqa: PLC0415

    try:
        folder = cache_folder()
        return {"path": cpu_path(), "kept_in": None if folder is None else str(folder)}
    except HipfireError as error:
        problems.append(error.line())
        return {"path": None, "kept_in": None}


def _folders(problems: list[str]) -> dict[str, Any]:
    try:
        home, models = env.home(), env.models_dir()
    except HipfireError as error:
        problems.append(error.line())
        return {"home": None, "models_dir": None, "disk_free_bytes": None}
    return {"home": str(home), "models_dir": str(models), "disk_free_bytes": host.disk_free(models)}


def _server(config: Config) -> dict[str, Any] | None:
    """Return what the server that is up says of itself, or None if none answers."""
    found = find_server(config)
    if found is None:
        return None
    health = found.health
    return {
        "address": str(found.remote.address),
        "pid": health.pid,
        "status": health.status,
        "model": health.model,
    }


def _changed(config: Config, problems: list[str]) -> list[str]:
    """Return a line for every setting that a file or a variable changes."""
    lines = [f"{name} ({model}) = {show(value)}"
             for model, entry in config.models.items() for name, value in entry.values.items()]  # fmt: skip
    for key in KEYS:
        try:
            found = config.resolve(key.name)
        except HipfireError as error:
            problems.append(error.line())
            continue
        if found.winner.origin != "default":
            lines.append(f"{key.name} = {show(found.value)} ({found.winner.source})")
    return lines


def _advice(facts: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if not facts["models"]:
        lines.append("no model is installed: `hipfire pull smollm2:135m` fetches a small one")
    if facts["libraries"]["torch"] is None:
        lines.append("torch is not installed: `pip install torch`")
    if facts["gpus"] == []:
        lines.append("torch sees no GPU; hipfire runs on the CPU")
    for gpu in facts["gpus"] if isinstance(facts["gpus"], list) else ():
        if gpu["problem"] is not None:
            lines.append(gpu["problem"])
    quota, cores = facts["cpu"]["quota_cores"], facts["cpu"]["usable_cores"]
    if quota is not None and quota < cores:
        lines.append(
            f"this container may use {quota:g} of {cores} cores; "
            f"hipfire takes {facts['cpu']['threads']} threads unless `hardware.threads` is set"
        )
    free = facts["disk_free_bytes"]
    if free is not None and free < LOW_DISK_BYTES:
        lines.append(f"only {size_text(free)} are free where models are kept; HIPFIRE_MODELS_DIR moves them")
    return lines


def _gpu_line(gpu: dict[str, Any]) -> str:
    free = "unusable" if gpu["free_bytes"] is None else f"{size_text(gpu['free_bytes'])} free"
    total = size_text(gpu["memory_bytes"])
    return f"{gpu['name']} ({gpu['arch']}), {total}, {free}, driver {gpu['driver']}, {gpu['runtime']}"


def _readable(facts: dict[str, Any]) -> dict[str, object]:
    cpu, memory, gpus = facts["cpu"], facts["memory"], facts["gpus"]
    quota = f", quota {cpu['quota_cores']:g}" if cpu["quota_cores"] is not None else ""
    shown: dict[str, object] = dict(facts)
    features = " ".join(cpu["features"]) or "no features"
    shown["cpu"] = f"{cpu['model']}, {cpu['usable_cores']} cores{quota}, {cpu['threads']} threads, {features}"
    shown["memory"] = ", ".join(
        f"{name.removesuffix('_bytes')} {size_text(value)}"
        for name, value in memory.items()
        if value is not None
    )
    kernels = facts["kernels"]
    shown["kernels"] = f"{kernels['path'] or 'unknown'}, kept in {kernels['kept_in'] or 'memory only'}"
    shown["libraries"] = [f"{name} {found or 'not installed'}" for name, found in facts["libraries"].items()]
    if isinstance(gpus, list):
        shown["gpus"] = [_gpu_line(gpu) for gpu in gpus] or "none"
    shown["models"] = [
        f"{model['name']}  {size_text(model['size_bytes'])}  {model['format']}" for model in facts["models"]
    ]
    server = facts["server"]
    shown["server"] = "none"
    if server is not None:
        shown["server"] = "{address}, process {pid}, {status}, {model}".format(**server)
    free = shown.pop("disk_free_bytes")
    shown["disk free"] = size_text(free) if isinstance(free, int) else "unknown"
    advice = shown.pop("advice")
    return shown | {"advice": advice}
