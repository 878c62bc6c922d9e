"""The proof that real agents install themselves in a sandbox and work there: each by its own set-up step, from the
registries, then again from the environment that was prepared.

    python benchmarks/proofs/agents_in_sandbox.py [--image python:3.12-slim-bookworm] [AGENT...]

Needs a Docker engine that has the image, whose containers reach npm and PyPI; behind a proxy, give what installing
takes with --install-env NAME=VALUE. The model is scripted. Exits 1 when an agent fails. What was prepared stays, about
a gigabyte an agent: rl-harness sandbox prune.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from rl_harness_cli_agents.testing import DONE, ScriptedRun, ending, write_number

AGENTS = ("claude-code", "mini-swe-agent", "nanobot", "pi", "openclaw")


def attempt(agent: str, directory: Path, options: list[str], sandbox: str) -> bool:
    run = ScriptedRun(directory)
    good = True
    for name in ("first", "again"):
        rules = [(DONE, ending(agent)), ("Write the number 36", write_number(agent))]
        try:
            report = run.report(agent, rules, "--name", name, *options, sandbox=sandbox, seconds=1500)
        except AssertionError as error:
            print(f"{agent}, {name}: failed\n{error}", file=sys.stderr)
            return False
        summary, counts = report["evaluations"][0]["summary"], report["sandboxes"]
        passed = summary["passed"] == 1 and summary["turns"] == 2 and not summary["flags"]
        good = good and passed and counts["snapshots_built"] == (name == "first")
        prepared = "prepared in" if counts["snapshots_built"] else "started from what was prepared in"
        seconds = summary["seconds"]
        print(
            f"{agent}, {name}: {'passed' if passed else 'FAILED'} in {summary['turns']} turns; {prepared} "
            f"{seconds['sandbox']:.1f} s, agent {seconds.get('agent', 0):.1f} s",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", default=AGENTS, metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--sandbox", default="docker")
    parser.add_argument("--image", help="the environment; unset: the sandbox's own")
    parser.add_argument("--install-env", action="append", default=[], metavar="NAME=VALUE")
    chosen = parser.parse_args()
    options = ["-o", "harness.install=sandbox"]
    if chosen.image:
        options += ["-o", f"sandbox.image={chosen.image}"]
    # Another environment than that of any proof before, so that it is made now.
    pairs = (pair.partition("=") for pair in [*chosen.install_env, f"PROOF={secrets.token_hex(4)}"])
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, _, value in pairs)
    options += ["-o", f"harness.install_env={{{table}}}"]
    failed = []
    for agent in chosen.agents:
        with tempfile.TemporaryDirectory(prefix="rl-harness-") as directory:
            if not attempt(agent, Path(directory), options, chosen.sandbox):
                failed.append(agent)
    print(f"failed: {', '.join(failed)}" if failed else "all of them work")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
