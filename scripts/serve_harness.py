"""Drive a real server as a client does, and report what it answered: `--help` lists the flags.

usage: serve_harness.py --model MODEL [--mode battery|chain|session] [--out REPORT.json] ...

docs/validation.md describes the modes, the report and the exit codes.
"""

from __future__ import annotations

import sys

from hipfire.validate.serve_harness import main

if __name__ == "__main__":
    sys.exit(main())
