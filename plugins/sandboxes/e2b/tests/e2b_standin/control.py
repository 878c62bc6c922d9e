"""What a test may do to the stand-in and ask it, one JSON object for each: ``{"do": NAME, ...arguments}``."""

from __future__ import annotations

from typing import Any

from e2b_standin.api import Api
from e2b_standin.faults import Faults, Rule
from e2b_standin.machines import Fleet
from e2b_standin.templates import Templates


class Control:
    def __init__(self, fleet: Fleet, templates: Templates, api: Api, faults: Faults) -> None:
        self._fleet = fleet
        self._templates = templates
        self._api = api
        self._faults = faults

    async def answer(self, request: dict[str, Any]) -> Any:
        return await getattr(self, f"do_{request.pop('do')}")(**request)

    async def do_fault(self, **rule: Any) -> None:
        """The next requests go wrong: see :class:`~e2b_standin.faults.Rule`."""
        self._faults.rules.append(Rule(**rule))

    async def do_mend(self) -> None:
        """Nothing more goes wrong."""
        self._faults.rules.clear()

    async def do_refuse_keys(self, message: str) -> None:
        """Every request is answered 401 from now on."""
        self._api.refused = message

    async def do_reset(self) -> None:
        """No faults, no counts, the usual settings, no snapshots or templates; what runs is ended."""
        self._faults.rules.clear()
        self._faults.calls.clear()
        self._api.refused = ""
        self._api.page = 100
        self._fleet.quota = 10_000
        self._fleet.disk = None
        self._fleet.hours = 24
        self._templates.filesystem_snapshots = True
        for machine in list(self._fleet.machines.values()):
            await machine.end()
        self._fleet.machines.clear()
        self._templates.reset()

    async def do_disk(self, size: int | None) -> None:
        """The machines made next have disks of so many bytes."""
        self._fleet.disk = size

    async def do_quota(self, sandboxes: int) -> None:
        self._fleet.quota = sandboxes

    async def do_plan(self, hours: int) -> None:
        """How long the team's sandboxes may live."""
        self._fleet.hours = hours

    async def do_page(self, size: int) -> None:
        """How many items one page of a listing has."""
        self._api.page = size

    async def do_full_snapshots_only(self) -> None:
        self._templates.filesystem_snapshots = False

    async def do_end(self, sandbox: str) -> None:
        """A sandbox dies by itself."""
        await self._fleet.machines[sandbox].end()

    async def do_interrupt(self, sandbox: str) -> None:
        """Every stream from a sandbox breaks off; it lives on."""
        self._fleet.machines[sandbox].interrupt()

    async def do_calls(self) -> dict[str, int]:
        return self._faults.calls

    async def do_sandboxes(self) -> list[dict[str, Any]]:
        return [
            {"id": machine.id, "state": machine.state, "ends_at": machine.ends_at, **dict(machine.request)}
            for machine in self._fleet.machines.values()
        ]

    async def do_templates(self) -> list[str]:
        return self._templates.names()

    async def do_build(self, template: str) -> Any:
        """The definition that a template was last built from."""
        return self._templates.find(template).builds[-1].definition
