"""Imports one plugin target and checks it; ``plugins check`` runs this module in a process for each target.

Usage: python -m rl_harness.cli.check_target KIND DISTRIBUTION:NAME [PLUGIN_FILE...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl_harness.errors import RlHarnessError
from rl_harness.plugins import load_registry

if __name__ == "__main__":
    kind, name, *files = sys.argv[1:]
    try:
        load_registry([Path(file) for file in files]).load(kind, name)
    except RlHarnessError as error:
        sys.exit(error.message)
