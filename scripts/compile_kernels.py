"""Compile every GPU kernel for AMD and NVIDIA where no GPU is, and check the result.

usage: compile_kernels.py [--target NAME]... [--kernel PART]... [--update] [--json FILE]

`--help` lists all flags. Exit code 0 if all is well, 1 if anything is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hipfire.validate.compile_gate import main

SNAPSHOT = Path(__file__).resolve().parents[1] / "tests" / "compile" / "registers.json"

if __name__ == "__main__":
    sys.exit(main(snapshot=SNAPSHOT))
