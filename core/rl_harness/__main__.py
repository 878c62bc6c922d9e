"""``python -m rl_harness``: the command line, where the script is not on the path."""

import sys

from rl_harness.cli.entry import main

sys.exit(main())
