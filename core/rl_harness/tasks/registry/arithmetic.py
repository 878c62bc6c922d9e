"""``shell-arithmetic``: sums, differences and products that an agent computes with a shell. Task directories are
generated into the cache, deterministically; no pair of operands, in either order, is in two splits.
"""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from rl_harness.contracts.benchmark import GeneratedBenchmark, Prompts
from rl_harness.contracts.common import Options
from rl_harness.records.turn import Message
from rl_harness.tasks.registry.place import registry_folder

_RESULTS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class ArithmeticOptions(Options):
    turns: Literal[1, 2] = Field(2, description="2: look at input.txt, then write; 1: the operands are in the prompt")


class Problem(NamedTuple):
    name: str
    kind: str
    a: int
    b: int


class ShellArithmetic(GeneratedBenchmark):
    """Two-turn and one-turn arithmetic, graded inside the sandbox."""

    api = 1
    name = "shell-arithmetic"
    Options = ArithmeticOptions

    def __init__(self, options: ArithmeticOptions) -> None:
        self._turns = options.turns
        self._folder = registry_folder(self.name)
        self._config = tomllib.loads((self._folder / "benchmark.toml").read_text(encoding="utf-8"))
        self._kinds = {kind["name"]: kind for kind in self._config["kinds"]}
        self.version = self._config["version"]

    @property
    def splits(self) -> Mapping[str, int]:
        return dict(self._config["splits"])

    @property
    def prompts(self) -> Prompts:
        prompts = self._config["prompts"][str(self._turns)]
        return Prompts(
            system=prompts["system"],
            examples=tuple(Message(role=role, content=content) for role, content in prompts["examples"]),
            max_turns=self._turns,
        )

    @property
    def defaults(self) -> Mapping[str, Any]:
        return dict(self._config["defaults"])

    def sources(self) -> Sequence[Path | str]:
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        return [*files, Path(__file__), f"turns={self._turns}"]

    def problems(self, split: str) -> Iterator[Problem]:
        """The problems of a split: the kinds in turn, operands drawn without repetition from the split's pairs."""
        draw = random.Random(f"{self.name}/{self.version}/{split}")
        low, high = self._config["pairs"][split]
        seen: set[tuple[str, int, int]] = set()
        kinds = list(self._kinds)
        for number in range(self.splits[split]):
            kind = kinds[number % len(kinds)]
            least, most = self._kinds[kind]["operands"]
            while True:
                a, b = draw.randint(least, most), draw.randint(least, most)
                if a == b or (kind == "diff" and a < b) or (kind, a, b) in seen:
                    continue
                if low <= _bucket(a, b) < high:
                    break
            seen.add((kind, a, b))
            yield Problem(f"{split}-{number:03d}-{kind}", kind, a, b)

    def write(self, split: str, folder: Path) -> None:
        prompt = self._config["prompts"][str(self._turns)]["instruction"]
        template = self._folder / "template"
        toml = (template / "task.toml").read_text(encoding="utf-8").format(turns=self._turns)
        test = (template / "test.sh").read_text(encoding="utf-8")
        for name, kind, a, b in self.problems(split):
            rules = self._kinds[kind]
            operator = rules["operator"]
            if self._turns == 2:
                what, solution = rules["two_turns"], f"read -r a b < input.txt\necho $((a {operator} b)) > answer.txt\n"
            else:
                what, solution = rules["one_turn"].format(a=a, b=b), f"echo $(({a} {operator} {b})) > answer.txt\n"
            task = folder / name
            files = {
                "instruction.md": prompt.format(what=what) + "\n",
                "task.toml": toml,
                "tests/test.sh": test,
                "tests/expected.txt": f"{_RESULTS[operator](a, b)}\n",
                "solution/solve.sh": "#!/bin/bash\n" + solution,
            }
            for part in ("environment/workspace", "tests", "solution"):
                (task / part).mkdir(parents=True)
            if self._turns == 2:
                files["environment/workspace/input.txt"] = f"{a} {b}\n"
            for path, text in files.items():
                (task / path).write_text(text, encoding="utf-8")


def _bucket(a: int, b: int) -> int:
    """0 to 99, the same for both orders of a pair."""
    pair = f"{min(a, b)},{max(a, b)}"
    return int.from_bytes(hashlib.sha256(pair.encode()).digest()[:8], "big") % 100
