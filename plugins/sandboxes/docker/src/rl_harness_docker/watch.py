"""What the engine says of our containers without being asked: a command has ended, a machine has died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from rl_harness_docker.engine import Engine, EngineError

_RETRY = 0.2
#: Events are for speed. What got lost with a broken stream is found by asking, this often.
ASK_EVERY = 5.0


class Watch:
    """Follows the events of the containers that carry ``label``. One for a provider, however many its sandboxes."""

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine = engine
        self._label = label
        self._commands: dict[str, asyncio.Future[int]] = {}
        self._machines: dict[str, asyncio.Event] = {}
        self._killed: set[str] = set()
        self._deaths: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._since = 0.0

    def start(self) -> None:
        if self._task is None:
            self._since = time.time()
            self._task = asyncio.create_task(self._follow())

    def command(self, identity: str) -> asyncio.Future[int]:
        """The exit code of an exec instance; :meth:`forget` it when it is no longer waited for."""
        return self._commands.setdefault(identity, asyncio.get_running_loop().create_future())

    def machine(self, identity: str) -> asyncio.Event:
        """Set whenever the container has stopped; whoever waits looks at why, and clears it."""
        return self._machines.setdefault(identity, asyncio.Event())

    def killed(self, identity: str) -> bool:
        """Whether somebody has asked the engine to kill the container."""
        return identity in self._killed

    def revived(self, identity: str) -> None:
        self._killed.discard(identity)

    def deaths(self, identity: str) -> int:
        """How often the container has stopped, as far as told."""
        return self._deaths.get(identity, 0)

    def forget(self, identity: str) -> None:
        self._commands.pop(identity, None)
        self._machines.pop(identity, None)
        self._killed.discard(identity)
        self._deaths.pop(identity, None)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(EngineError, OSError):
                await self._read()
            await asyncio.sleep(_RETRY)

    async def _read(self) -> None:
        filters = {"type": ["container"], "label": [self._label], "event": ["exec_die", "kill", "die", "destroy"]}
        params = {"filters": json.dumps(filters), "since": f"{self._since:.6f}"}
        async with self._engine.stream("GET", "/events", params=params) as response:
            async for line in response.content:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._heard(json.loads(line))

    def _heard(self, event: dict) -> None:  # type: ignore[type-arg]  # JSON
        self._since = max(self._since, event["timeNano"] / 1e9)
        attributes = event["Actor"]["Attributes"]
        if event["Action"].startswith("exec_die"):
            waiter = self._commands.get(attributes["execID"])
            if waiter is not None and not waiter.done():
                waiter.set_result(int(attributes["exitCode"]))
        elif event["Action"] == "kill":
            if event["Actor"]["ID"] in self._machines:
                self._killed.add(event["Actor"]["ID"])
        elif (stopped := self._machines.get(event["Actor"]["ID"])) is not None:
            self._deaths[event["Actor"]["ID"]] = self.deaths(event["Actor"]["ID"]) + 1
            stopped.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
