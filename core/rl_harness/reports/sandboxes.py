"""What a run's sandboxes cost it, in words: how many were ready when asked for, and what was prepared or wasted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rl_harness.reports.tables import duration, number, rate


def sandbox_lines(counts: Mapping[str, float]) -> Iterator[str]:
    """Lines about ``counts``, the sum of a run's supply metrics; none where no sandbox was needed."""
    hits, late, misses = (int(counts.get(name, 0)) for name in ("hits", "late", "misses"))
    leases = hits + late + misses
    if leases:
        unplanned = int(counts.get("unplanned", 0))
        yield (
            f"sandboxes: {hits} of {leases} ready when asked for ({rate(hits / leases)}), {late} under way, "
            f"{misses} made on the spot{f', {unplanned} unplanned' if unplanned else ''}; "
            f"waited {number(counts.get('wait_seconds', 0.0) / leases)} s each"
        )
        yield f"  {_waste(counts)}"
    if counts.get("snapshots_started"):
        built, found = int(counts.get("snapshots_built", 0)), int(counts.get("snapshots_found", 0))
        seconds = f" in {duration(counts.get('snapshots_build_seconds', 0.0))}" if built else ""
        yield (
            f"environments: {built} prepared{seconds}, {found} found prepared; "
            f"{int(counts['snapshots_started'])} sandboxes started from them"
        )


def _waste(counts: Mapping[str, float]) -> str:
    unused, dead, failed = (int(counts.get(name, 0)) for name in ("unused", "dead", "failed"))
    said = f"{int(counts.get('started', 0))} made ahead, {unused} never used"
    if dead:
        said += f" ({dead} dead when asked for)"
    if failed:
        said += f", {failed} could not be made"
    return f"{said}; stood ready for {duration(counts.get('idle_seconds', 0.0))} in all"
