"""`hipfire ps`: which server and which engine of this home run, and what they hold."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from hipfire.base import env
from hipfire.base.config import Config
from hipfire.base.errors import HipfireError
from hipfire.cli.output import size_text, write, write_fields, write_json
from hipfire.cli.remote import Health, Remote
from hipfire.cli.serving import find_server, recorded_server
from hipfire.cli.settings import load_settings
from hipfire.engine.lock import PROC, ProcessRecord, ownership_fault, read_pid_file


def ps(*, as_json: Annotated[bool, Parameter(name=["-j", "--json"], negative="")] = False) -> None:
    """Show the server and the engine that run.

    Parameters
    ----------
    as_json
        Write JSON.
    """
    facts = collect(load_settings())
    if as_json:
        write_json(facts)
    elif facts["server"] is None and facts["daemon"] is None:
        write("no server is running")
    else:
        write_fields(_readable(facts))


def collect(config: Config) -> dict[str, Any]:
    """Return what runs as plain data: `server` and `daemon`, each None if there is none."""
    return {"server": _server(config), "daemon": _process(read_pid_file(env.daemon_lock_path()))}


def _server(config: Config) -> dict[str, Any] | None:
    found = find_server(config)
    if found is not None:
        ours = recorded_server(config)
        tracked = ours is not None and ours.fault is None and ours.record.pid == found.health.pid
        return _answering(found.remote, found.health) | {"tracked": tracked}
    known = recorded_server(config)
    if known is None or not known.alive or known.fault is not None:
        return None
    # it runs and does not answer: starting, stopping, or stuck
    silent = {"address": str(known.address), "pid": known.record.pid, "status": "no answer", "tracked": True}
    return silent | {"memory_bytes": _memory(known.record.pid)}


def _answering(remote: Remote, health: Health) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "address": str(remote.address),
        "pid": health.pid,
        "status": health.status,
        "model": health.model,
        "loading_model": health.loading,
        "memory_bytes": None if health.pid is None else _memory(health.pid),
    }
    try:
        return facts | {"stats": dict(remote.stats())}
    except HipfireError as error:
        return facts | {"stats": None, "fault": error.line()}


def _process(record: ProcessRecord | None) -> dict[str, Any] | None:
    if record is None or ownership_fault(record) is not None:
        return None
    return {"pid": record.pid, "memory_bytes": _memory(record.pid)}


def _memory(pid: int) -> int | None:
    """Return the memory that a process has in use, in bytes, or None where the system does not tell."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(sizes[0]) * 1024 if sizes else None


def _readable(facts: dict[str, Any]) -> dict[str, object]:
    shown: dict[str, object] = {}
    server, daemon = facts["server"], facts["daemon"]
    if server is not None:
        origin = "" if server["tracked"] else " (not started from this home)"
        shown["server"] = f"{server['address']}, process {server['pid']}, {server['status']}{origin}"
        loading = server.get("loading_model")
        shown["model"] = f"loading {loading}" if loading else server.get("model") or "none loaded"
        if stats := server.get("stats"):
            shown["requests"] = (
                f"{stats.get('requests_served')} served, {stats.get('running', 0)} running, "
                f"{stats.get('queue_depth')} waiting"
            )
            shown["up for"] = _duration(stats.get("uptime_sec") or 0)
    if daemon is not None:
        shown["engine"] = f"process {daemon['pid']}"
    sizes = [process["memory_bytes"] for process in (server, daemon) if process and process["memory_bytes"]]
    return shown | {"memory": size_text(sum(sizes)) if sizes else "unknown"}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
