"""``python -m rl_harness_cli_agents install NAME…``: install agents on this machine ahead of any run."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time

from rl_harness.errors import RlHarnessError

from rl_harness_cli_agents.agent import CliAgent
from rl_harness_cli_agents.plugin import rl_harness_harnesses


def agents() -> dict[str, str]:
    """What there is, and where."""
    return {extension.name: extension.load for extension in rl_harness_harnesses()}


def load(target: str) -> CliAgent:
    """An agent with its default options, by ``module:class``."""
    module, _, name = target.partition(":")
    made: CliAgent = getattr(importlib.import_module(module), name)
    return made


async def install(names: list[str], known: dict[str, str]) -> int:
    """Install each, and say what came of it; how many failed."""
    failed = 0
    for name in names:
        kind = load(known[name])
        agent = kind(kind.Options(install="host"))
        started = time.monotonic()
        try:
            await agent.preflight()
            await agent.start()
        except RlHarnessError as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr)
        else:
            print(f"{name} {agent.version}: {agent.mounts[0].source} ({time.monotonic() - started:.0f} s)", flush=True)
    return failed


def main(known: dict[str, str], program: str) -> int:
    """The command line, for the agents of one package."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("install", help="install agents on this machine, for sandboxes that are shown them")
    command.add_argument("names", nargs="+", choices=sorted(known), metavar="NAME", help=", ".join(sorted(known)))
    return 1 if asyncio.run(install(parser.parse_args().names, known)) else 0


if __name__ == "__main__":
    sys.exit(main(agents(), "rl_harness_cli_agents"))
