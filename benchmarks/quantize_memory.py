"""Peak memory and rate of `hipfire quantize` on a synthetic safetensors folder of a chosen size.

usage: quantize_memory.py [--gib 3] [--format mq4] [--keep FOLDER]

Writes a Llama checkpoint of random bf16 weights, converts it in a child process, and prints the child's peak
resident memory beside the sizes of source and container.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hipfire.models.family import family_of

HIDDEN, INTERMEDIATE, VOCAB = 2048, 8192, 32000
BF16 = 2


def main() -> None:
    """Make the checkpoint, convert it, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--format", default="mq4")
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch) / "model"
        source = write_checkpoint(folder, int(arguments.gib * 2**30))
        out = Path(scratch) / f"out.{arguments.format}"
        command = [sys.executable, "-m", "hipfire.cli", "quantize", str(folder)]
        began = time.perf_counter()
        subprocess.run([*command, "--format", arguments.format, "-o", str(out), "--json"], check=True)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"machine: {platform.processor() or platform.machine()}, {platform.system()}")
        print(f"source {source / 2**30:.2f} GiB, container {out.stat().st_size / 2**30:.2f} GiB")
        print(f"peak resident memory {peak / 2**20:.0f} MiB, {source / 2**20 / seconds:.0f} MiB/s of source")


def write_checkpoint(folder: Path, size: int) -> int:
    """Write a Llama checkpoint of about `size` bytes; returns the bytes of its weights."""
    family = family_of("llama")
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": HIDDEN // 16,
        "tie_word_embeddings": True,
    }
    per_layer = BF16 * (3 * HIDDEN * INTERMEDIATE + 3 * HIDDEN * HIDDEN)
    config["num_hidden_layers"] = max(1, (size - BF16 * VOCAB * HIDDEN) // per_layer)
    shapes = family.from_hf(config).tensors()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        nbytes = BF16 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    # the upper halves of float32 normals are bf16 numbers
    pool = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32).view(np.uint32) >> 16
    block = pool.astype(np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        left = offset
        while left:
            left -= stream.write(block[: min(left, len(block))])
    return offset


if __name__ == "__main__":
    main()
