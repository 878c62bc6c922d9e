"""What an agent's function is given: a :class:`Task` with, perhaps, a :class:`Sandbox`."""

from __future__ import annotations

import base64
from typing import Any

from .channel import Channel


class Result:
    """How a command in the sandbox ended; ``stdout`` and ``stderr`` are bytes, ``text`` is stdout decoded."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.exit_code: int = fields["exit_code"]
        self.stdout = base64.b64decode(fields["stdout"])
        self.stderr = base64.b64decode(fields["stderr"])
        self.signal: int | None = fields["signal"]
        self.timed_out: bool = fields["timed_out"]
        self.stdout_truncated: bool = fields["stdout_truncated"]
        self.stderr_truncated: bool = fields["stderr_truncated"]
        self.seconds: float = fields["seconds"]

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"Result(exit_code={self.exit_code}, stdout={self.stdout!r}, stderr={self.stderr!r})"


class Sandbox:
    """The task's sandbox. Its methods may be called from any thread; those with an ``a`` are for async agents."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def exec(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str = b"",
        timeout: float | None = None,
        output_limit: int = 1 << 20,
    ) -> Result:
        """Run a shell string or an argv to its end. Each runs in a new shell that starts in ``task.workdir``."""
        fields = {"cwd": cwd, "env": env, "user": user, "timeout": timeout, "output_limit": output_limit}
        return Result(self._channel.call("exec", command=command, stdin=_encoded(stdin), **fields))

    def read_file(self, path: str) -> bytes:
        """The bytes of a file; raises ``FileNotFoundError``, or ``OSError`` for anything not a readable file."""
        return base64.b64decode(self._channel.call("read_file", path=path))

    def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file, creating parent directories."""
        self._channel.call("write_file", path=path, data=_encoded(data), mode=mode)

    async def aexec(self, command: str | list[str], **options: Any) -> Result:
        import asyncio

        return await asyncio.to_thread(self.exec, command, **options)

    async def aread_file(self, path: str) -> bytes:
        import asyncio

        return await asyncio.to_thread(self.read_file, path)

    async def awrite_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        import asyncio

        await asyncio.to_thread(self.write_file, path, data, mode=mode)


class Task:
    """One attempt. ``examples`` are chat messages; ``base_url`` and ``api_key`` open the model named ``model``.

    ``sandbox`` is None for a task that has none. The same address and key are in ``OPENAI_BASE_URL`` and
    ``OPENAI_API_KEY``, the model's name in ``RL_HARNESS_MODEL``.
    """

    def __init__(self, fields: dict[str, Any], sandbox: Sandbox | None) -> None:
        self.name: str = fields["name"]
        self.instruction: str = fields["instruction"]
        self.workdir: str = fields["workdir"]
        self.system: str | None = fields["system"]
        self.examples: list[dict[str, Any]] = fields["examples"]
        self.max_turns: int = fields["max_turns"]
        self.time_limit: float = fields["time_limit"]
        self.model: str | None = fields["model"]
        self.base_url: str | None = fields["base_url"]
        self.api_key: str | None = fields["api_key"]
        self.sandbox = sandbox


def _encoded(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode("ascii")
