"""Snapshots are images the engine commits from containers: one for the agent's, and one for each service beside it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from rl_harness.contracts.sandbox import SnapshotInfo
from rl_harness.errors import SandboxError, Unsupported

from rl_harness_docker import containers
from rl_harness_docker.compose import MAIN
from rl_harness_docker.engine import Engine, EngineError

REPOSITORY = {"snapshot": "rl-harness-snapshot", "fork": "rl-harness-fork"}
_PART = "rl-harness-part"

#: Bytes in a snapshot beyond what it was made from, at most.
LARGEST = 64 << 30


class Snapshots:
    """Those of one engine; what is made carries the label of ``owner``."""

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine = engine
        self._owner = owner

    async def commit(
        self, parts: Mapping[str, str], kind: str, *, key: str = "", labels: Mapping[str, str] | None = None
    ) -> str:
        """Freeze the containers of a sandbox, by the names of their services. ``kind`` is snapshot or fork, which goes
        with the sandboxes made from it. Cancelled, it leaves nothing."""
        for container in parts.values():
            await self._check(container)
        task = asyncio.ensure_future(self._commit(dict(parts), kind, key, labels or {}))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self.remove(await task)
            raise

    async def _commit(self, parts: dict[str, str], kind: str, key: str, labels: Mapping[str, str]) -> str:
        tag = secrets.token_hex(12)
        made: dict[str, str] = {}
        # The agent's last: a snapshot is there when it is, and whole.
        for service in sorted(parts, key=lambda name: name == MAIN):
            name = f"{REPOSITORY[kind]}:{tag}" if service == MAIN else f"{_PART}:{tag}-{service}"
            image_labels = containers.labels(kind if service == MAIN else "part", self._owner, labels)
            image_labels |= {containers.KEY: key, containers.PARTS: json.dumps(made)}
            repository, _, reference = name.partition(":")
            params = {"container": parts[service], "repo": repository, "tag": reference}
            try:
                await self._engine.request(
                    "POST", "/commit", params=params, body={"Labels": image_labels}, timeout=None
                )
            except BaseException:
                for part in made.values():
                    await self._remove_image(part)
                raise
            made[service] = name
        return made[MAIN]

    async def _check(self, container: str) -> None:
        """Raises Unsupported for what no snapshot holds, SandboxError for more than an engine should be asked to copy:
        once begun it goes on with that, whoever has gone."""
        state = await self._engine.request("GET", f"/containers/{container}/json", params={"size": 1})
        if volumes := sorted(state["Config"].get("Volumes") or {}):
            raise Unsupported(
                f"the image {state['Config']['Image']} keeps {', '.join(volumes)} on volumes, which no snapshot holds",
                remedy="remove VOLUME from its Dockerfile, or switch snapshots off",
            )
        written = state.get("SizeRw") or 0
        if written > LARGEST:
            raise SandboxError(
                f"{written >> 30} GiB were written in the sandbox, holes in files included, which the engine would "
                f"write out whole: more than the {LARGEST >> 30} GiB that a snapshot may have"
            )

    async def images(self, snapshot: str) -> dict[str, dict[str, Any]]:
        """What the engine says of each service's image in a snapshot."""
        if not _is_ours(snapshot):
            raise SandboxError(f"there is no snapshot {snapshot!r}")
        try:
            image = await self._engine.request("GET", f"/images/{snapshot}/json")
            parts = json.loads(image["Config"]["Labels"].get(containers.PARTS, "{}"))
            found = {name: await self._engine.request("GET", f"/images/{part}/json") for name, part in parts.items()}
        except EngineError as error:
            if error.status == 404:
                raise SandboxError(f"snapshot {snapshot} is no longer there") from None
            raise
        return {**found, MAIN: image}

    async def list(self, labels: Mapping[str, str] | None) -> builtins.list[SnapshotInfo]:
        found = []
        for image in await self._labelled("snapshot"):
            name = _tag(image, REPOSITORY["snapshot"])
            given = containers.given_labels(image["Labels"])
            if name is None or not (labels or {}).items() <= given.items():
                continue
            try:
                history = await self._engine.request("GET", f"/images/{name}/history")
            except EngineError:
                continue  # removed meanwhile
            found.append(
                SnapshotInfo(
                    id=name,
                    provider="docker",
                    key=image["Labels"].get(containers.KEY, ""),
                    labels=given,
                    created_at=float(image["Created"]),
                    size=history[0]["Size"] if history else None,
                )
            )
        return found

    async def _labelled(self, kind: str, *, dangling: bool = False) -> builtins.list[dict[str, Any]]:
        filters = json.dumps({"label": [f"{containers.KIND}={kind}"], "dangling": [str(dangling).lower()]})
        return list(await self._engine.request("GET", "/images/json", params={"filters": filters}) or ())

    async def remove(self, snapshot: str, *, unused: bool = False) -> None:
        """With its parts; ``unused``: unless a container runs from it. What one runs from loses its name now, and its
        content in :meth:`sweep`."""
        if not _is_ours(snapshot):
            return
        with contextlib.suppress(SandboxError):
            for service, image in (await self.images(snapshot)).items():
                if service != MAIN:
                    for name in image.get("RepoTags") or ():
                        await self._remove_image(name, force=not unused)
        await self._remove_image(snapshot, force=not unused)

    async def sweep(self) -> None:
        """Remove what lost its name while a container ran from it, and is needed by none now."""
        for kind in ("snapshot", "fork", "part"):
            for image in await self._labelled(kind, dangling=True):
                with contextlib.suppress(EngineError):  # somebody else sweeps too
                    await self._remove_image(image["Id"], force=False)

    async def _remove_image(self, name: str, *, force: bool = True) -> None:
        try:
            await self._engine.request("DELETE", f"/images/{name}", params={"force": force})
        except EngineError as error:
            if error.status not in (404, 409):
                raise

    async def reap(self, dead: Callable[[Mapping[str, str]], bool]) -> None:
        """Remove forks, and parts without their snapshot, whose owner is gone; and :meth:`sweep`."""
        await self.sweep()
        for fork in await self._labelled("fork"):
            name = _tag(fork, REPOSITORY["fork"])
            if name is not None and dead(fork["Labels"]):
                await self.remove(name)
        whole = {_tag(image, REPOSITORY["snapshot"]) for image in await self._labelled("snapshot")}
        for part in await self._labelled("part"):
            name = _tag(part, _PART)
            if name is None or not dead(part["Labels"]):
                continue
            if f"{REPOSITORY['snapshot']}:{name.partition(':')[2].partition('-')[0]}" not in whole:
                await self._remove_image(name)


def snapshot_of(tag: str) -> str | None:
    """What an image of this name is part of: a snapshot, or itself when it is none of ours. None for a fork, which is
    there for its containers only."""
    repository, _, reference = tag.partition(":")
    if repository == _PART:
        return f"{REPOSITORY['snapshot']}:{reference.partition('-')[0]}"
    return None if repository == REPOSITORY["fork"] else tag


def _is_ours(snapshot: str) -> bool:
    return snapshot.partition(":")[0] in REPOSITORY.values()


def _tag(image: Mapping[str, Any], repository: str) -> str | None:
    return next((tag for tag in image.get("RepoTags") or () if tag.startswith(f"{repository}:")), None)
