"""Which sandboxes could run what the chosen one cannot, for those who are told that it cannot."""

from __future__ import annotations

from collections.abc import Sequence

from rl_harness.jobs.supply import make_provider
from rl_harness.plugins import Registry, known_plugins
from rl_harness.tasks import Task, unsupported


def sandboxes_that_can(registry: Registry, chosen: str, tasks: Sequence[Task]) -> str:
    """A remedy: the installed sandboxes that can run all ``tasks``, or else the packages that have others."""
    installed = {entry.name: entry.full_name for entry in registry.entries("sandboxes")}
    able = [name for name, full in installed.items() if name != chosen and _can(registry, full, tasks)]
    if able:
        return f"sandboxes that can: {', '.join(able)} (--sandbox {able[0]})"
    others = {name: package for name, package in known_plugins()["sandboxes"].items() if name not in installed}
    if not others:
        return "no sandbox that is installed can; change the task"
    packages = ", ".join(f"{name} (pip install {package})" for name, package in others.items())
    return f"no sandbox that is installed can; others may: {packages}"


def _can(registry: Registry, name: str, tasks: Sequence[Task]) -> bool:
    try:
        able = make_provider(registry, name, {}).capabilities
        return able.isolated and not any(unsupported(task, able) for task in tasks)
    except Exception:  # a plugin that does not load, or needs an option, is no advice
        return False
