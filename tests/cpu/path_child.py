"""Run as a program: cases of all operations on the path that the environment names; prints their digests."""

from __future__ import annotations

import json
from itertools import islice

from cpu_kit import digest, outcome
from op_cases import SOME_LAYOUTS, op_cases
from row_cases import random_rows

from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.products import quantized
from hipfire.kernels.cpu.target import cpu_path, host_features


def digests() -> dict[str, str]:
    """Check cases of every operation; returns the digests of each operation's results."""
    found = {}
    for name, cases in op_cases(SOME_LAYOUTS).items():
        results = []
        # every fifth, which are in one piece and padded in turn
        for case in islice(cases(), 0, None, 5):
            got = outcome(case, 2)
            case.check(got)
            results.append(digest(got))
        found[name] = "".join(results)
    found["quantize"] = digest(
        part for columns in (7, 40, 576) for part in quantized(CpuEngine(2), random_rows(5, columns, seed=3))
    )
    return found


if __name__ == "__main__":
    print(json.dumps({"path": cpu_path(), "features": sorted(host_features()), "digests": digests()}))
