"""Every error a user or plugin author can catch. Each says what was wrong, where, and what to do.

The command line turns a subclass into one line on stderr and its ``exit_code``; a traceback goes to the
run's log, or to the terminal with ``--debug``.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BrokenSandbox",
    "ConfigError",
    "EngineError",
    "HarnessError",
    "PluginError",
    "PluginFileError",
    "RlHarnessError",
    "RunError",
    "SandboxError",
    "SetupFailed",
    "TaskError",
    "Unavailable",
    "UnknownModel",
    "UnknownName",
    "UnsafeFiles",
    "Unsupported",
    "UsageError",
]


class RlHarnessError(Exception):
    """Base of all errors raised on purpose.

    ``message`` says what is wrong and where; ``remedy``, when given, says what the user can do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


class UsageError(RlHarnessError):
    """The command line or the configuration asks for something that does not exist or cannot be."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file or option is wrong; the message names file, key and reason."""


class UnknownName(UsageError):
    """A name that no plugin registered; the message offers the nearest names and the package that has it."""


class PluginError(RlHarnessError):
    """A plugin could not be loaded or broke its contract; the message names its distribution and version."""


class PluginFileError(PluginError):
    """A local plugin file that the user named is not there or does not load."""

    exit_code = 2


class Unsupported(RlHarnessError):
    """An optional operation or a requested capability that this plugin does not have."""

    exit_code = 2


class Unavailable(RlHarnessError):
    """``preflight`` tried the real thing and something is missing on this machine."""


class WrongValue(Unavailable):
    """An option names something that is not there, or cannot be used."""

    exit_code = 2


class UnknownModel(Unavailable):
    """No model of this name is found: neither a folder, nor one the engine brings, nor one at a hub."""

    exit_code = 2


class TaskError(RlHarnessError):
    """A task directory is wrong; the message names the file, the key and the reason."""

    exit_code = 2


class SandboxError(RlHarnessError):
    """The sandbox, not the agent, failed: the episode is unscored with reason ``sandbox_error``."""


class SetupFailed(SandboxError):
    """A set-up step failed: its author's doing. The message has its name, how it ended and the end of its output."""


class UnsafeFiles(SandboxError):
    """Files made by an agent that are not copied out: too large, devices, links that leave their tree. The
    agent's doing, not an infrastructure failure. ``full``: the sandbox they were to go into has no room for them."""

    def __init__(self, message: str, *, remedy: str | None = None, full: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.full = full


class BrokenSandbox(UnsafeFiles):
    """Programs of a live sandbox that worked when it started, and that its provider needs, do not work any more: the
    doing of whoever was in it since, so that no agent escapes its grade by breaking them."""


class EngineError(RlHarnessError):
    """The inference engine, not the agent, failed: the episode is unscored with reason ``engine_error``. ``status``:
    what an API answered with, if it did."""

    def __init__(self, message: str, *, remedy: str | None = None, status: int | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class HarnessError(RlHarnessError):
    """The harness, not the agent, failed: the episode is unscored with reason ``harness_error``."""


class BackendError(RlHarnessError):
    """The training backend failed or refused a step. The model and optimizer are as they were before the call."""


class RequestRefused(EngineError):
    """The engine works, but not on this request: the client is told, with the engine's own ``status`` and ``code``
    if it gave them."""

    def __init__(self, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message, status=status)
        self.code = code


class RunError(RlHarnessError):
    """A run directory cannot be used: it is live, belongs to another configuration, or is damaged."""
