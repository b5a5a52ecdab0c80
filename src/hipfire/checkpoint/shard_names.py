"""The usual names of split GGUF models, `<stem>-00002-of-00003.gguf`, and which files of a folder are one.

Only names count here; whether the files fit together is in their metadata (gguf_split.py).
"""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:\.gguf)?", re.IGNORECASE)


def set_name(name: str) -> str:
    """Return what the name of a shard, also without suffix, shares with its siblings'; empty for another."""
    named = _NAME.fullmatch(name)
    return f"{named['stem']}-of-{named['count']}" if named else ""


def file_set(path: Path) -> str:
    """Return `set_name` of a GGUF file; empty for another file."""
    return set_name(path.name) if path.suffix.lower() == ".gguf" else ""


def shard_count(name: str) -> int:
    """Return how many shards there are according to the name of one of them; 1 for another name."""
    named = _NAME.fullmatch(name)
    return int(named["count"]) if named else 1


def shard_name(name: str, number: int) -> str:
    """Return the name of shard `number` (from 1) in the set of the shard `name`; empty for another name."""
    named = _NAME.fullmatch(name)
    return f"{named['stem']}-{number:05d}-of-{named['count']}.gguf" if named else ""


def siblings(path: Path) -> list[Path]:
    """Return the files of the set that the shard at `path` belongs to, in order; itself for another name.

    Files that are not there are left out.
    """
    wanted = file_set(path)
    if not wanted:
        return [path]
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:
        return [path]
    found = [each for each in beside if file_set(each) == wanted and not each.is_dir()]
    return found or [path]
