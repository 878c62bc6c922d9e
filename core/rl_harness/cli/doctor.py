"""``rl-harness doctor``: tries what a run needs on this machine and says how to get what is missing."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from rl_harness.cli.options import debug_option, echo_json, json_option, plugin_option

if TYPE_CHECKING:
    from rl_harness.errors import RlHarnessError
    from rl_harness.plugins import Entry, Registry
    from rl_harness.runs.resolve import Resolved

Status = Literal["ok", "note", "missing", "FAIL"]

#: Kinds whose ``preflight`` tries something of this machine.
_TRIED = ("sandboxes", "engines", "backends", "harnesses", "benchmarks")
#: Seconds that one preflight may take.
_PATIENCE = 60.0
_LOW_DISK = 5 * 1024**3

_KERNEL_SETTINGS = {
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "unprivileged user namespaces are switched off"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": ("1", "AppArmor restricts user namespaces"),
    "/proc/sys/user/max_user_namespaces": ("0", "user namespaces are switched off"),
}


class Finding(NamedTuple):
    """``missing`` is something this configuration does not use; ``FAIL`` something it does."""

    what: str
    status: Status
    detail: str
    remedy: str | None = None


@click.command()
@plugin_option
@json_option
@debug_option
def doctor(plugin_files: tuple[Path, ...], as_json: bool) -> int:
    """Check what works on this machine, with remedies.

    Exit code 1 when something that the configuration in force needs does not work. Where nothing chooses a model, the
    default engine for local models may be missing: models behind an address (--base-url) need none.
    """
    from rl_harness.runs.resolve import resolve

    flags: dict[tuple[str, ...], tuple[str, Any]] = {}
    if plugin_files:
        flags["plugins",] = ("-p", [str(file) for file in plugin_files])
    resolved = resolve(flags, strict=False)
    findings = []
    for finding in _findings(resolved):
        findings.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        echo_json([finding._asdict() for finding in findings])
    return 1 if any(finding.status == "FAIL" for finding in findings) else 0


def _show(finding: Finding) -> None:
    click.echo(f"{finding.status:<8}{finding.what}: {finding.detail}")
    if finding.remedy:
        click.echo(f"{'':8}remedy: {finding.remedy}")


def _findings(resolved: Resolved) -> Iterator[Finding]:
    yield from _machine()
    yield from _disk(resolved.config.runs_dir)
    yield from _plugins(resolved.registry)
    yield Finding("configuration", "ok", str(resolved.file) if resolved.file else "no rl-harness.toml, defaults apply")
    absent = _absent_default_engine(resolved)
    if absent is not None:
        name = resolved.config.engine.name
        detail = f"not installed; it runs local models, and models behind an address (--base-url) work without {name}"
        yield Finding(f"engine {name}", "missing", detail, absent.remedy)
    for error in resolved.errors:
        if absent is None or error.message != absent.message:
            yield Finding("configuration", "FAIL", error.message, error.remedy)
    for kind in _TRIED:
        for entry in resolved.registry.entries(kind):
            yield _try(resolved, entry)


def _absent_default_engine(resolved: Resolved) -> RlHarnessError | None:
    """Why the default engine is not there, if nobody asked for it: neither by name nor by giving a local model."""
    from rl_harness.errors import UnknownName
    from rl_harness.runs.resolve import DEFAULT

    origin = next((setting.origin for setting in resolved.settings if setting.key == "engine.name"), None)
    if origin != DEFAULT or resolved.config.model is not None:
        return None
    try:
        resolved.registry.find("engines", resolved.config.engine.name)
    except UnknownName as error:
        return error
    return None


def _machine() -> Iterator[Finding]:
    from rl_harness import __version__

    yield Finding("rl-harness", "ok", f"{__version__} in {Path(__file__).parents[1]}")
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    if sys.platform != "linux":
        detail = f"{platform.system()} {platform.release()}: evaluation works, the sandbox local needs Linux"
        yield Finding("system", "note", detail)
        return
    yield Finding("system", "ok", f"Linux {platform.release()}, {os.cpu_count()} cores, {_memory()}")
    for file, (bad, meaning) in _KERNEL_SETTINGS.items():
        path = Path(file)
        if path.is_file() and path.read_text().strip() == bad:
            yield Finding("kernel", "note", f"{meaning} ({file} is {bad}); see the sandboxes below")
    filesystems = Path("/proc/filesystems").read_text().split()
    if "overlay" not in filesystems:
        yield Finding("kernel", "note", "overlayfs is not loaded", "modprobe overlay (as root)")


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 1024**3:.0f} GiB of memory"


def _disk(runs_dir: Path) -> Iterator[Finding]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for what, directory in (("runs", runs_dir), ("cache", cache), ("temporary files", Path(tempfile.gettempdir()))):
        existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        detail = f"{free / 1024**3:.1f} GiB free at {directory}"
        low = free < _LOW_DISK
        if not os.access(existing, os.W_OK):
            yield Finding(f"disk for {what}", "FAIL", f"{existing} is not writable", "choose another directory")
        else:
            yield Finding(f"disk for {what}", "note" if low else "ok", detail, "free some space" if low else None)


def _plugins(registry: Registry) -> Iterator[Finding]:
    for plugin in registry.plugins():
        if plugin.problems:
            remedy = "upgrade or uninstall it, or switch it off with RL_HARNESS_DISABLE_PLUGINS"
            yield Finding(f"plugin {plugin.label}", "missing", "; ".join(plugin.problems), remedy)
        else:
            detail = "disabled" if plugin.disabled else f"{len(plugin.entries)} registered"
            yield Finding(f"plugin {plugin.label}", "ok", detail)


def _try(resolved: Resolved, entry: Entry) -> Finding:
    """Create it, with the configured options if it is the configured one, and try it.

    An engine that is not configured is not tried: it may be somebody's server.
    """
    from rl_harness.contracts import SandboxProvider
    from rl_harness.errors import ConfigError, RlHarnessError
    from rl_harness.kinds import KINDS

    kind = KINDS[entry.kind]
    what = f"{kind.singular} {entry.name}"
    choice = getattr(resolved.config, kind.section)
    in_use = {str(setting.value) for setting in resolved.settings if setting.key == f"{kind.section}.name"}
    used = entry.name in {name.partition("@")[0].rpartition(":")[2] for name in in_use}
    bad: Status = "FAIL" if used else "missing"
    try:
        plugin = resolved.registry.create(entry.kind, entry.full_name, choice.plugin_options if used else {})
    except ConfigError:
        return Finding(what, "ok", "loads; it has options that must be given before it can be tried")
    except RlHarnessError as error:
        return Finding(what, bad, error.message, error.remedy)
    if entry.kind == "engines" and not used:
        return Finding(what, "ok", "loads; not tried, since this configuration does not use it")

    async def attempt() -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                await plugin.preflight()
        finally:
            if isinstance(plugin, SandboxProvider):
                await plugin.close()

    try:
        asyncio.run(attempt())
    except TimeoutError:
        return Finding(what, bad, f"its preflight does not end within {_PATIENCE:g} s")
    except RlHarnessError as error:
        return Finding(what, bad, error.message, error.remedy)
    except Exception as error:  # a plugin's fault must not end the examination
        return Finding(what, bad, f"its preflight raised {type(error).__name__}: {error}")
    return Finding(what, "ok", _abilities(plugin) if isinstance(plugin, SandboxProvider) else entry.extension.summary)


def _abilities(provider: object) -> str:
    from rl_harness.contracts import SandboxProvider

    assert isinstance(provider, SandboxProvider)
    can = provider.capabilities
    parts = ["isolated" if can.isolated else "NOT isolated"]
    parts.append(f"limits: {', '.join(sorted(can.limits)) or 'none'}")
    parts.append(f"snapshot: {can.snapshot.value}")
    parts += [word for word, has in (("fork", can.fork), ("gpu", can.gpu)) if has]
    return ", ".join(parts)
