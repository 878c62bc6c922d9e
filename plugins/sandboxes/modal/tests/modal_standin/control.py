"""What a test may do to the stand-in and ask it, one JSON object for each: ``{"do": NAME, ...arguments}``."""

from __future__ import annotations

from typing import Any

from modal_standin.control_plane import ControlPlane
from modal_standin.faults import Faults, Rule
from modal_standin.fleet import Fleet, summary


class Control:
    def __init__(self, fleet: Fleet, plane: ControlPlane, faults: Faults) -> None:
        self._fleet = fleet
        self._plane = plane
        self._faults = faults

    async def answer(self, request: dict[str, Any]) -> Any:
        return await getattr(self, f"do_{request.pop('do')}")(**request)

    async def do_mend(self) -> None:
        """Nothing more goes wrong."""
        self._faults.rules.clear()

    async def do_fault(self, **rule: Any) -> None:
        """The next calls go wrong: see :class:`~modal_standin.faults.Rule`."""
        self._faults.rules.append(Rule(**rule))

    async def do_refuse_tokens(self, message: str) -> None:
        """Every call is answered UNAUTHENTICATED from now on."""
        self._plane.refused = message

    async def do_reset(self) -> None:
        """No faults, no counts, the usual settings; what runs is ended."""
        self._faults.rules.clear()
        self._faults.calls.clear()
        self._plane.refused = ""
        self._plane.page = 100
        self._fleet.quota = 10_000
        self._fleet.disk = None
        for machine in list(self._fleet.machines.values()):
            await machine.close()
        self._fleet.machines.clear()

    async def do_disk(self, size: int | None) -> None:
        """The machines made next have disks of so many bytes."""
        self._fleet.disk = size

    async def do_quota(self, sandboxes: int) -> None:
        self._fleet.quota = sandboxes

    async def do_page(self, size: int) -> None:
        """How many sandboxes one page of a listing has."""
        self._plane.page = size

    async def do_end(self, sandbox: str, status: str, exitcode: int = 0, exception: str = "") -> None:
        """A sandbox dies by itself."""
        self._fleet.machines[sandbox].end(status, exitcode=exitcode, exception=exception)

    async def do_calls(self) -> dict[str, int]:
        return self._faults.calls

    async def do_sandboxes(self) -> list[dict[str, Any]]:
        return [summary(machine) for machine in self._fleet.machines.values()]
