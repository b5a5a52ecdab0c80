"""`python -m hipfire.cli` is the `hipfire` command."""

import sys

from hipfire.cli.main import main

sys.exit(main())
