"""Tools that act in the sandbox of the attempt that this process makes; errors are told to the model, not raised."""

from __future__ import annotations

import posixpath
from typing import Any

from langchain_core.tools import BaseTool, tool

#: Characters of a result that the model is shown, and seconds that a command may take.
_SHOWN = 8000
_TIMEOUT = 60.0

_attempt: list[Any] = []


def bind(task: Any) -> None:
    """From here on the tools act for this task; a process has one."""
    _attempt[:] = [task]


def sandbox_tools() -> list[BaseTool]:
    """All of them, for an agent that takes a list."""
    return [shell, read_file, write_file]


@tool
def shell(command: str) -> str:
    """Run a shell command and return what it prints. Every command runs in a new shell in the working directory."""
    result = _sandbox().exec(command, timeout=_TIMEOUT)
    text = _shortened((result.stdout + result.stderr).decode("utf-8", "replace"))
    if result.timed_out:
        return f"{text}\n[stopped after {_TIMEOUT:g} seconds]"
    return text if result.exit_code == 0 else f"{text}\n[exit code {result.exit_code}]"


@tool
def read_file(path: str) -> str:
    """Return the text of a file. A relative path starts at the working directory."""
    try:
        return _shortened(_sandbox().read_file(_absolute(path)).decode("utf-8", "replace"))
    except OSError as error:
        return f"Error: {error}"


@tool
def write_file(path: str, content: str) -> str:
    """Write a text file, with the folders it lies in. A relative path starts at the working directory."""
    try:
        _sandbox().write_file(_absolute(path), content)
    except OSError as error:
        return f"Error: {error}"
    return f"{path} is written."


def _sandbox() -> Any:
    if not _attempt or _attempt[0].sandbox is None:
        why = "the task has none" if _attempt else "the harness langchain runs no attempt in this process"
        raise RuntimeError(f"there is no sandbox: {why}")
    return _attempt[0].sandbox


def _absolute(path: str) -> str:
    return posixpath.join(_attempt[0].workdir, path) if _attempt else path


def _shortened(text: str) -> str:
    left_out = len(text) - _SHOWN
    if left_out <= 0:
        return text
    return f"{text[: _SHOWN // 2]}\n[... {left_out} characters left out ...]\n{text[-_SHOWN // 2 :]}"
