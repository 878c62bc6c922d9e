"""The conformance kit of sandbox providers: what every one must do, as checks a plugin runs in its own tests.

In a test module of the plugin::

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_conformance(check, provider, tmp_path):
        if reason := check.inapplicable(provider.capabilities):
            pytest.skip(reason)
        await check.run(provider, tmp_path)

A failed check raises AssertionError with what was expected. Checks are independent and clean up after themselves.
"""

from __future__ import annotations

from rl_harness.testing.sandbox import commands, files, lifecycle, limits, streams
from rl_harness.testing.sandbox.kit import Check, Context

CHECKS: tuple[Check, ...] = (
    *commands.checks,
    *streams.checks,
    *files.checks,
    *lifecycle.checks,
    *limits.checks,
)

__all__ = ["CHECKS", "Check", "Context"]
