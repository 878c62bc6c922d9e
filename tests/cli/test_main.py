"""The command line as a user meets it: start-up, help, errors and exit codes."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rl_harness.cli import main as main_module
from rl_harness.cli.main import main
from rl_harness.errors import Unavailable

HEAVY = {"pydantic", "numpy", "rich", "msgspec", "aiohttp", "pluggy", "torch"}

BUILT_ON_CLICK = """
import sys
from rl_harness.cli.main import main
code = main({arguments!r})
heavy = {heavy!r}
print("code", code, "loaded", sorted(name for name in heavy if name in sys.modules),
      sorted(name for name in sys.modules if name.startswith("rl_harness") and "plugin" in name))
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_imports_no_plugin_and_nothing_but_click() -> None:
    code = BUILT_ON_CLICK.format(
        arguments=["--help"], heavy=HEAVY | {"asyncio", "tomllib", "json", "importlib.metadata"}
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "code 0 loaded [] []"
    assert "Evaluate an agent on tasks, or train the model behind it." in output


@pytest.mark.parametrize("command", ["run", "tasks check", "plugins show", "runs compare", "config show", "doctor"])
def test_every_command_has_help_and_loads_no_plugin_for_it(command: str) -> None:
    code = BUILT_ON_CLICK.format(arguments=[*command.split(), "--help"], heavy=HEAVY)
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1].startswith("code 0 loaded []")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from rl_harness import __version__

    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("what", ["device", "pipe", "large", "folder"])
@pytest.mark.parametrize("where", ["--config", "-p", "task.toml", "instruction.md"])
def test_what_is_no_file_to_read_is_an_error_at_once(
    what: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--config /dev/zero`` filled the memory; a pipe was waited for without end."""
    task = tmp_path / "task"
    task.mkdir()
    (task / "instruction.md").write_text("Say 4.\n")
    (task / "task.toml").write_text("[rl_harness]\nanswer = '4'\n")
    path = {"--config": tmp_path / "my.toml", "-p": tmp_path / "my.py"}.get(where, task / where)
    path.unlink(missing_ok=True)
    if what == "device":
        path.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    arguments = ["run", "./task", "--harness", "nop", *([where, str(path)] if where.startswith("-") else [])]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert {"large": "larger than 16 MiB", "folder": "it is "}.get(what, "not a regular file") in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean run?"),
        (["run", "--no-such-flag"], "No such option"),
        (["run", "one", "two"], "give one benchmark, or task directories: one, two are benchmarks or not there"),
        (["run", "--sandbox", "locla"], "did you mean local?"),
        (["run", "shell-arithmtic"], "did you mean shell-arithmetic"),
        (["run", "nosuch-dir"], "there is no folder 'nosuch-dir' here, and no benchmark of that name is registered"),
        (["run", "shell-basicc"], "did you mean shell-basics"),
        (["run", "shell-basics", "-p", "gone.py"], "there is no plugin file gone.py"),
        (["run", "shell-basics", "-p", "broken.py"], "plugin file broken.py does not load: SyntaxError"),
        (["run", "./nowhere"], "there is no task directory nowhere"),
        (["run", "--trainer", "gpro"], "did you mean grpo?"),
        (["run", "-o", "seed"], "not of the form key=value"),
        (["run", "--config", "gone.toml"], "there is no configuration file gone.toml"),
        (["plugins", "show", "shel"], "did you mean shell"),
        (["plugins", "check", "acme"], "no plugin of acme is installed"),
        (["runs", "show", "gone"], "there is no run 'gone'"),
        (["tasks", "check", "./nowhere"], "there is no such directory"),
        (["tasks", "list", "shell-basic"], "did you mean shell-basics"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("def broken(:\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def _failing(error: BaseException):
    def resolve(*arguments: object, **options: object) -> None:
        raise error

    return resolve


def test_an_unexpected_error_is_one_line_and_a_file_with_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rl_harness.plugins.load_registry", _failing(RuntimeError("over\nturned")))
    assert main(["plugins", "list"]) == 1
    error = capsys.readouterr().err
    assert "error: unexpected RuntimeError: over turned" in error
    (log,) = tmp_path.glob("rl-harness-*.log")
    assert str(log) in error
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize("arguments", [["--debug", "plugins", "list"], ["plugins", "list", "--debug"]])
def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr("rl_harness.plugins.load_registry", _failing(RuntimeError("overturned")))
    with pytest.raises(RuntimeError, match="overturned"):
        main(arguments)


def test_a_full_disk_is_told_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(28, "No space left on device", "/runs/x")
    monkeypatch.setattr("rl_harness.plugins.load_registry", _failing(full))
    assert main(["plugins", "list"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: [Errno 28] No space left on device: '/runs/x'\n  remedy: no space left in /runs: ")
    assert "traceback" not in told


def test_an_error_out_of_concurrent_tasks_is_told_as_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ExceptionGroup("tasks", [ExceptionGroup("more", [Unavailable("no such machine", remedy="buy one")])])
    monkeypatch.setattr("rl_harness.plugins.load_registry", _failing(group))
    assert main(["plugins", "list"]) == 1
    assert capsys.readouterr().err == "error: no such machine\n  remedy: buy one\n"


def test_a_bare_word_is_a_benchmark_even_beside_a_directory_of_that_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shell-basics").mkdir()
    (tmp_path / "mine").mkdir()
    arguments = ["--harness", "nop", "--sandbox", "process", "--dry-run"]
    assert main(["run", "shell-basics", *arguments]) == 0
    assert "benchmark.name" in capsys.readouterr().out
    assert main(["run", "./shell-basics", "mine", *arguments]) == 0
    assert '["shell-basics", "mine"]' in capsys.readouterr().out
    assert main(["run", "shell-basics", "mine", *arguments]) == 2
    assert "written ./NAME" in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_harness.plugins.load_registry", _failing(KeyboardInterrupt()))
    assert main(["plugins", "list"]) == 130


def test_native_windows_is_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module.sys, "platform", "win32")
    assert main(["--help"]) == 2
    assert "WSL 2" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m rl_harness config show --harness nop | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(tmp_path: Path, closed: str) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q/instruction.md").write_text("Say 4.")
    (tmp_path / "q/task.toml").write_text("[rl_harness]\nanswer = '4'\n")
    run = f"{sys.executable} -m rl_harness run ./q --harness nop {closed}"
    assert subprocess.run(run, shell=True, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == ["q"]


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    run = f"cd gone && rmdir ../gone && exec {sys.executable} -m rl_harness runs list"
    done = subprocess.run(run, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: the working directory no longer exists")


def test_shell_completion_offers_commands_and_plugin_names() -> None:
    def complete(words: str, position: int) -> list[str]:
        environment = {"_RL_HARNESS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(position)}
        command = [sys.executable, "-m", "rl_harness"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert complete("rl-harness ru", 1) == ["run", "runs"]
    assert {"local", "process"} <= set(complete("rl-harness run --sandbox ", 3))


INTERRUPTED_WHILE = """
import os, signal, sys
from rl_harness.cli import entry

class Interrupting:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.argv = ["rl-harness", "--help"]
sys.meta_path.insert(0, Interrupting())
code = entry.main()
if {again}:
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(code)
"""


@pytest.mark.parametrize("module", ["rl_harness.cli.main", "rl_harness.cli.lazy", "click"])
@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_while_loading_or_leaving_is_told_by_the_exit_code_alone(module: str, again: bool) -> None:
    code = INTERRUPTED_WHILE.format(module=module, again=again)
    # Whatever runs these tests may ignore the signal, as shells have what they put into the background do.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, preexec_fn=heard)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_error_commands_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> int:
        raise Unavailable("set-up failed:\n\x1b]0;pwned\x07\x1b[31mred\r\x9b2Jäé")

    monkeypatch.setattr(main_module, "_run", fail)
    main(["doctor"])
    said = capsys.readouterr().err
    assert said.isprintable() or all(line.isprintable() for line in said.splitlines())
    assert "set-up failed:\n" in said
    assert "red" in said
    assert "äé" in said


def test_a_full_disk_wherever_it_is_met_has_a_remedy(capsys, tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))
    assert main_module._report(error) == 1
    assert f"remedy: no space left in {tmp_path}: free some there" in capsys.readouterr().err
    assert main_module._report(PermissionError(errno.EACCES, "Permission denied", "/x")) == 1
    assert "remedy" not in capsys.readouterr().err
