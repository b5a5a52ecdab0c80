"""Load a real server with clients that come, go and err, and kill its engine: `--help` lists the flags.

usage: serve_load.py --model MODEL [--clients N] [--requests N] [--kills N] [--seed N] [--out REPORT.json]

docs/validation.md describes the requests, the proofs and the exit codes.
"""

from __future__ import annotations

import sys

from hipfire.validate.load import main

if __name__ == "__main__":
    sys.exit(main())
