"""Encode and decode rates of every weight format, beside a plain copy of the same float32 bytes.

usage: formats.py [--rows 2048] [--cols 4096] [--rounds 7]

Prints medians in MB/s of float32 weights and the ratio to the copy, all from one run. Rounds of the arms
alternate, so that a machine that drifts slows all of them alike.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import all_formats

ROW = "{:<12} {:>10} {:>10} {:>10} {:>10} {:>12}"


def main() -> None:
    """Time all formats and print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    weight = torch.randn(arguments.rows, arguments.cols, generator=torch.Generator().manual_seed(0))
    formats = [fmt for fmt in all_formats() if fmt.encode is not None]
    packed = {fmt.qtype: encode(fmt, weight) for fmt in formats}
    target = torch.empty_like(weight)
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        measure(seconds, "copy", lambda: target.copy_(weight))
        for fmt in formats:
            measure(seconds, f"encode {fmt.name}", lambda fmt=fmt: encode(fmt, weight))
            measure(
                seconds, f"decode {fmt.name}", lambda fmt=fmt: fmt.dense(packed[fmt.qtype], *weight.shape)
            )
    megabytes = weight.numel() * 4 / 1e6
    rates = {name: megabytes / statistics.median(times) for name, times in seconds.items()}
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{arguments.rows} x {arguments.cols} float32, median of {arguments.rounds} rounds")
    print(f"copy {rates['copy']:.0f} MB/s")
    print(ROW.format("format", "encode", "of copy", "decode", "of copy", "bits/weight"))
    for fmt in formats:
        encoding, decoding = rates[f"encode {fmt.name}"], rates[f"decode {fmt.name}"]
        print(
            ROW.format(
                fmt.name,
                f"{encoding:.0f}",
                f"{encoding / rates['copy']:.3f}",
                f"{decoding:.0f}",
                f"{decoding / rates['copy']:.3f}",
                f"{fmt.bits_per_weight(*weight.shape):.3f}",
            )
        )


def encode(fmt: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
    """Return the packed bytes of `weight`."""
    if fmt.encode is None:
        raise SystemExit(f"{fmt.name} cannot be written")
    return fmt.encode(weight)


def measure(seconds: dict[str, list[float]], name: str, work: Callable[[], object]) -> None:
    """Append the wall time of one call."""
    began = time.perf_counter()
    work()
    seconds.setdefault(name, []).append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
