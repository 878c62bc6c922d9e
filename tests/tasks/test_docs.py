"""docs/tasks.md and the reader of task.toml know the same keys (known fault 43)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rl_harness.records.episode import UnscoredReason
from rl_harness.tasks import load_task
from rl_harness.tasks.toml_file import Table

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")

EVERYTHING = """
artifacts = [{ source = "/app/x" }]
[task]
name = "a/b"
authors = [{ name = "A" }]
[agent]
[verifier]
environment_mode = "separate"
[verifier.environment]
[solution]
[environment]
[rl_harness]
"""
#: Inside a value that the page describes in words.
WITHIN = {("artifacts", "source"), ("artifacts", "exclude"), ("task.authors", "name"), ("task.authors", "email")}


def documented() -> set[tuple[str, str]]:
    keys = set()
    for cell in re.findall(r"^\| (.*?) \|", PAGE.partition("## task.toml")[2].partition("## Benchmarks")[0], re.M):
        if " of an artifact" in cell:
            keys |= {("artifacts", "destination"), ("artifacts", "service")}
            continue
        table = re.match(r"`\[(\w+)\]`", cell)
        names = re.findall(r"`(\w+)`", cell)
        keys |= {(table.group(1) if table else "", name) for name in names}
        if table and not names:
            keys.add(("", table.group(1)))
    return keys - {("", "key")}


def test_the_page_lists_every_key_and_no_other(write_task, monkeypatch: pytest.MonkeyPatch):
    read: set[tuple[str, str]] = set()
    finish = Table.finish

    def spy(self: Table, *arguments) -> None:
        read.update((".".join(self.key), name) for name in self._asked)
        finish(self, *arguments)

    monkeypatch.setattr(Table, "finish", spy)
    load_task(write_task(EVERYTHING))
    environment = {name for table, name in read if table == "environment"}
    assert environment == {name for table, name in read if table == "verifier.environment"}
    tables = {("", name) for name in ("task", "agent", "verifier", "solution", "environment", "rl_harness")}
    read = {key for key in read if key[0] != "verifier.environment"} - WITHIN - tables
    assert read == documented()


def test_the_example_is_a_task(write_task):
    for example in re.findall(r"```toml\n(.*?)```", PAGE, re.S):
        task = load_task(write_task(example))
        assert (task.max_turns, task.verifier.mode, task.limits.memory) == (20, "separate", 512 << 20)


def test_every_reason_on_the_page_exists():
    table = PAGE.partition("| reason |")[2].partition("\n\n")[0]
    reasons = set(re.findall(r"^\| `(\w+)`", table, re.M))
    assert reasons <= {str(reason) for reason in UnscoredReason}
    assert len(reasons) == 5
