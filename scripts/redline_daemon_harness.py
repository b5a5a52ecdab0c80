"""Prove through the engine's daemon that replayed decode steps change no byte: `--help` lists the flags.

usage: redline_daemon_harness.py --model MODEL [--positions N] [--context N] [--batch N ...] [--json FILE] ...

docs/validation.md describes the arms, the report and the exit codes.
"""

from __future__ import annotations

import sys

from hipfire.validate.redline_harness import main

if __name__ == "__main__":
    sys.exit(main(through_daemon=True, program="redline_daemon_harness"))
