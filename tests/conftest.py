"""Settings for all tests."""

from __future__ import annotations

import os

# the tests run in two workers: more threads in each would only wait for one another. Set before torch is
# imported, and inherited by the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
