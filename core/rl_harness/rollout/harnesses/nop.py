"""Harness ``nop``: does nothing at all. A task it passes has a verifier that proves nothing."""

from __future__ import annotations

from rl_harness.contracts.common import API
from rl_harness.contracts.harness import Harness, HarnessCapabilities, HarnessContext, HarnessResult
from rl_harness.records.episode import Termination


class NopHarness(Harness):
    """Ends at once with an empty answer."""

    api = API

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(protocols=frozenset(), needs_sandbox=False)

    async def run(self, context: HarnessContext) -> HarnessResult:
        return HarnessResult(termination=Termination.ANSWER, answer="")
