"""What a task asks for and a sandbox cannot give, told before a run starts instead of ignored."""

from __future__ import annotations

from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, NetworkPolicy, SandboxCapabilities, SnapshotLevel
from rl_harness.tasks.task import Task

_LIMIT_KEYS = {"memory": "memory_mb", "disk": "storage_mb", "cpus": "cpus"}


_HARBORS_DEFAULT = (
    " ('full' is network_mode = 'public', which a Harbor task without the key has too; where it can do without, write "
    "network_mode = 'no-network')"
)
#: What is told before anything runs in a sandbox that isolates nothing.
UNISOLATED = "it isolates nothing: agents, graders and set-up steps run as you on this machine, with all of its files"


def unsupported(task: Task, capabilities: SandboxCapabilities, *, unisolated_setup: bool = False) -> list[str]:
    """One sentence for everything ``task`` needs of a sandbox that ``capabilities`` lack; empty when it can run.

    ``unisolated_setup``: its user accepts that set-up steps, which expect a machine of their own, run on this one.
    """
    if not task.needs_sandbox:
        return []
    missing = _environment("environment", task.environment, task.limits, task.network, capabilities)
    verifier = task.verifier
    if verifier.mode == "separate":
        table = "verifier.environment" if verifier.environment is not task.environment else "environment"
        asked = _environment(table, verifier.environment, verifier.limits, verifier.network, capabilities)
        missing += [sentence for sentence in asked if sentence not in missing]
    elif capabilities.isolated and not capabilities.changes:
        missing.append(
            "[verifier] the verifier shares the agent's sandbox, whose changes this one cannot list to tell tampering"
        )
    elif capabilities.isolated and task.environment.setup and capabilities.snapshot is SnapshotLevel.NONE:
        missing.append(
            "[verifier] the verifier shares the agent's sandbox, where this one, having no snapshots, cannot tell what "
            "set-up steps changed from what the agent did"
        )
    if verifier.user not in (None, "root", "0") and not capabilities.users:
        missing.append(f"[verifier] user: the sandbox cannot run commands as {verifier.user!r}")
    steps = dict.fromkeys(step.name for step in (*task.environment.setup, *verifier.environment.setup))
    if steps and not capabilities.isolated and not unisolated_setup:
        missing.append(
            f"{', '.join(steps)}: the sandbox isolates nothing, so this set-up would run as you on this machine; "
            "use a sandbox that isolates, or accept that with -o snapshots.allow_unisolated=true"
        )
    if task.gpus and not capabilities.gpu:
        missing.append("[environment] gpus: the sandbox has none; modal's have with -o sandbox.gpu=TYPE")
    elif task.gpus > 1:
        missing.append(
            "[environment] gpus: how many a sandbox has is not known here, so only 1 can be asked for; give all "
            "sandboxes of the run more with -o sandbox.gpu=TYPE:N"
        )
    return missing


def _environment(
    table: str,
    environment: EnvironmentSpec,
    limits: Limits,
    network: NetworkPolicy,
    capabilities: SandboxCapabilities,
) -> list[str]:
    missing = []
    if environment.image and not capabilities.image:
        missing.append(f"[{table}] docker_image: the sandbox cannot start from an image")
    if environment.dockerfile and not capabilities.dockerfile:
        missing.append(f"{environment.dockerfile}: the sandbox cannot build an image")
    if environment.compose and not capabilities.compose:
        missing.append(f"{environment.compose}: the sandbox cannot start several containers")
    unrestricted = network is NetworkPolicy.NONE and not capabilities.isolated  # see Task.sandbox_spec
    if network not in capabilities.network and not unrestricted:
        offered = ", ".join(sorted(capabilities.network))
        missing.append(
            f"[{table}] network_mode: the task needs the network policy {network.value!r} and the sandbox offers "
            f"{offered}{_HARBORS_DEFAULT if network is NetworkPolicy.FULL else ''}"
        )
    for name, key in _LIMIT_KEYS.items():
        if getattr(limits, name) is not None and name not in capabilities.limits:
            missing.append(f"[{table}] {key}: the sandbox cannot enforce this limit")
    return missing
