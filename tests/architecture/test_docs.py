"""The documentation says what the code does: hooks, keys, files and commands in it are checked."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from rl_harness import hookspecs
from rl_harness.cli.main import cli
from rl_harness.errors import ConfigError
from rl_harness.kinds import KINDS
from rl_harness.runs.keys import known_keys
from rl_harness.runs.layers import PREFIX
from rl_harness.runs.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
DOCS = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("plugins/*/*/README.md")),
]


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Every fenced block of a language in the documentation, with where it starts."""
    for file in DOCS:
        text = file.read_text("utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if found.group(1) == language:
                yield f"{file.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 1}", found.group(2)


def inline() -> Iterator[tuple[str, str]]:
    """Whole commands within sentences; one with a placeholder for choices or parts left out is none."""
    for file in DOCS:
        for found in re.finditer(r"`(rl-harness [^`]+)`", file.read_text("utf-8")):
            if not re.search(r"\||\[|\.\.\.|…", found.group(1)):
                yield str(file.relative_to(ROOT)), found.group(1)


def test_every_hook_is_documented_with_its_exact_signature() -> None:
    text = (ROOT / "docs" / "plugins.md").read_text("utf-8")
    for kind in KINDS.values():
        function = getattr(hookspecs, kind.hook)
        returned = inspect.signature(function).return_annotation
        row = next(line for line in text.splitlines() if f"`{kind.hook}" in line)
        parameters = str(inspect.signature(function).replace(return_annotation=inspect.Signature.empty))
        assert f"`{kind.hook}{parameters} -> {returned}`" in row
        assert all(f"`{contract}`" in row for contract in kind.contracts)


def test_hook_specifications_say_what_they_are_for() -> None:
    assert all(getattr(hookspecs, kind.hook).__doc__ for kind in KINDS.values())


def test_the_table_of_keys_is_current() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tools'); import config_reference as c;"
        "sys.stdout.write(c.updated(c.TARGET.read_text('utf-8')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    current = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert done.stdout == current, "run: python tools/config_reference.py"


def test_every_key_is_read_somewhere() -> None:
    """A key that the model has and no code reads would be accepted and ignored."""
    core = ROOT / "core" / "rl_harness"
    readers = [file for part in ("cli", "jobs", "runs", "rollout", "reports") for file in (core / part).rglob("*.py")]
    attributes = {
        node.attr
        for file in readers
        if file.name != "config.py"
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
    }
    while_resolving = {("plugins",)}
    unread = [".".join(key) for key in known_keys() if key[-1] not in attributes and key not in while_resolving]
    assert not unread


def configurations() -> list[tuple[str, str]]:
    found = [(str(file.relative_to(ROOT)), file.read_text("utf-8")) for file in sorted(ROOT.glob("examples/*.toml"))]
    return found + [(where, text) for where, text in blocks("toml") if "rl-harness.toml" in text.splitlines()[0]]


@pytest.mark.parametrize(("where", "text"), configurations(), ids=[where for where, _ in configurations()])
def test_every_configuration_in_the_documentation_loads(
    where: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rl-harness.toml"
    file.write_text(text)
    resolved = resolve({}, [], config=file, environment={}, strict=False)
    assert not [error for error in resolved.errors if isinstance(error, ConfigError)], where


def command_lines() -> list[tuple[str, str]]:
    found = []
    for where, text in [*blocks(""), *blocks("bash"), *blocks("console"), *blocks("sh"), *inline()]:
        for line in text.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").partition(" #")[0].strip()
            while re.match(rf"{PREFIX}\w+=\S+ |[A-Z_]+=\S+ ", words):
                words = words.partition(" ")[2]
            if words.startswith("rl-harness "):
                found.append((where, words))
    return found


@pytest.mark.parametrize(("where", "line"), command_lines(), ids=[line for _, line in command_lines()])
def test_every_command_in_the_documentation_exists_with_its_flags(where: str, line: str) -> None:
    words = shlex.split(line.replace("...", "x"))[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="rl-harness")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"{where}: no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    try:
        with contextlib.suppress(click.exceptions.Exit):  # --help
            command.make_context("rl-harness", words, obj={})
    except click.UsageError as error:
        pytest.fail(f"{where}: {line}: {error.format_message()}")


@pytest.mark.parametrize(
    ("document", "module", "stub", "chosen", "passed"),
    [
        (
            "sandboxes.md",
            "acme_boxes/sandbox.py",
            "from rl_harness.sandboxes.process import ProcessProvider as AcmeProvider\n",
            "exit_code",
            1,
        ),
        (
            "harnesses.md",
            "my_agent.py",
            "from rl_harness.rollout.harnesses.chat import ChatHarness as MyHarness\n",
            "model_calls or cancel",
            1,
        ),
    ],
)
def test_the_kits_in_the_documentation_run_as_printed(
    tmp_path: Path, document: str, module: str, stub: str, chosen: str, passed: int
) -> None:
    """A plugin's author got a missing fixture, and tests that pytest does not await."""
    text = (ROOT / "docs" / document).read_text("utf-8")
    files = dict(re.findall(r"^```\w+\n# (tests/test_\w+\.py|pyproject\.toml)\n(.*?)^```$", text, re.M | re.S))
    assert len(files) == 2
    for name, content in {**files, module: stub}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", chosen, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) >= passed
    assert "warning" not in done.stdout
