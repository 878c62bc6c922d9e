"""docs/harnesses.md names every harness, option and termination there is, and no option that is not."""

from __future__ import annotations

import re
from pathlib import Path

from rl_harness.builtins import rl_harness_harnesses
from rl_harness.records import Termination
from rl_harness.rollout.harnesses.python import PythonOptions
from rl_harness.rollout.harnesses.shell import ShellOptions

PAGE = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text()


def test_every_harness_and_termination_is_named():
    for extension in rl_harness_harnesses():
        assert re.search(rf"^\| `{extension.name}[`:]", PAGE, re.MULTILINE), extension.name
    assert [name for name in Termination if f"`{name}`" not in PAGE] == []


def test_the_options_are_those_of_the_code():
    for heading, options in [("shell", ShellOptions), ("python", PythonOptions)]:
        section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `harness\.(\w+)`", section, re.MULTILINE) == list(options.model_fields)
