"""Run as a program: all cases on the path that the environment chooses; prints digests of the results."""

from __future__ import annotations

import json

from cpu_kit import digest, outcome
from op_cases import SOME_LAYOUTS, op_cases
from row_cases import random_rows

from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.products import quantized
from hipfire.kernels.cpu.target import cpu_path, host_features


def digests() -> dict[str, str]:
    """Check every case of every operation; returns the digest of each operation's results."""
    found = {}
    for name, cases in op_cases(SOME_LAYOUTS).items():
        results = []
        for case in cases():
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
