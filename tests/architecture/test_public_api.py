"""Every change of what users and plugin authors may rely on shows in a diff of ``public_api.txt``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_public_interface_is_the_recorded_one() -> None:
    code = "import sys; sys.path.insert(0, 'tools'); import public_api; sys.stdout.write(public_api.describe())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    recorded = (ROOT / "tests" / "architecture" / "public_api.txt").read_text("utf-8")
    assert done.stdout == recorded, "if the change is meant: python tools/public_api.py"
