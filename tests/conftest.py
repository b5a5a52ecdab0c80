"""Settings for all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# the tests run in two workers: more threads in each would only wait for one another. Set before torch is
# imported, and inherited by the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# kernels for GPUs are interpreted where there is none; Triton reads this when it is first imported
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# a run in the background ignores this, and so would all programs that tests start and interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
