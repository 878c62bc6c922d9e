"""``python -m rl_harness_claw install NAME…``: install assistants on this machine ahead of any run."""

from __future__ import annotations

import sys

from rl_harness_cli_agents.__main__ import main

from rl_harness_claw.plugin import rl_harness_harnesses


def agents() -> dict[str, str]:
    """What there is, and where."""
    return {extension.name: extension.load for extension in rl_harness_harnesses()}


if __name__ == "__main__":
    sys.exit(main(agents(), "rl_harness_claw"))
