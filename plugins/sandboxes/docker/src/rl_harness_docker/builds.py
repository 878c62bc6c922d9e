"""The images that were built for Dockerfiles: what stands on them, when one was last asked for, and removing one."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rl_harness.contracts.sandbox import BuildInfo

from rl_harness_docker import containers
from rl_harness_docker.engine import Engine, EngineError
from rl_harness_docker.images import BUILT
from rl_harness_docker.snapshots import snapshot_of


class Builds:
    """Those of one engine, whoever had them built."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def list(self) -> list[BuildInfo]:
        filters = json.dumps({"label": [f"{containers.KIND}=build"]})
        listed = await self._engine.request("GET", "/images/json", params={"filters": filters}) or ()
        # What others built on one of ours has its labels, and a name of its own.
        names = {tag: image for image in listed for tag in image.get("RepoTags") or () if tag.startswith(f"{BUILT}:")}
        users = await self._users() if names else {}
        found = []
        for name, image in names.items():
            try:
                inspected = await self._engine.request("GET", f"/images/{name}/json")
            except EngineError as error:
                if error.status == 404:  # removed meanwhile
                    continue
                raise
            created_at = float(image["Created"])
            found.append(
                BuildInfo(
                    id=name,
                    provider="docker",
                    source=containers.given_labels(image["Labels"]).get("context", ""),
                    created_at=created_at,
                    last_used=max(created_at, _named_at(inspected)),
                    used_by=tuple(sorted(users.get(image["Id"], ()))),
                    size=image.get("Size"),
                )
            )
        return found

    async def _users(self) -> dict[str, set[str]]:
        """By image, what stands on it: containers, and images with a name that are no builds of ours. Between two of
        those the engine itself keeps what they share."""
        images = await self._engine.request("GET", "/images/json", params={"all": 1}) or ()
        parents = {image["Id"]: image.get("ParentId") for image in images}
        users: dict[str, set[str]] = {}
        for container in await self._engine.request("GET", "/containers/json", params={"all": 1}) or ():
            name = container["Names"][0].lstrip("/") if container.get("Names") else container["Id"]
            # A service goes with its sandbox, whose name its own begins with.
            sandbox = name[: containers.NAME_LENGTH] if _kind(container) == "service" else name
            for image in _with_ancestors(container["ImageID"], parents):
                users.setdefault(image, set()).add(sandbox)
        for image in images:
            for tag in image.get("RepoTags") or ():
                if tag != "<none>:<none>" and not tag.startswith(f"{BUILT}:") and (user := snapshot_of(tag)):
                    for below in _with_ancestors(image["Id"], parents):
                        users.setdefault(below, set()).add(user)
        return users

    async def remove(self, build: str) -> bool:
        """Unless something stands on it."""
        if not build.startswith(f"{BUILT}:"):
            return True
        if any(info.used_by for info in await self.list() if info.id == build):
            return False
        try:
            await self._engine.request("DELETE", f"/images/{build}", params={"force": False})
        except EngineError as error:
            if error.status not in (404, 409):
                raise
            return error.status == 404  # in use since: the engine's own word
        return True


def _kind(found: Mapping[str, Any]) -> str | None:
    return (found.get("Labels") or {}).get(containers.KIND)


def _with_ancestors(image: str, parents: Mapping[str, str | None]) -> Iterator[str]:
    each: str | None = image
    while each:
        yield each
        each = parents.get(each)


def _named_at(inspected: Mapping[str, Any]) -> float:
    """When it last got its name: every time that it is asked for."""
    said = (inspected.get("Metadata") or {}).get("LastTagTime") or ""
    try:
        return datetime.datetime.fromisoformat(said).timestamp()
    except ValueError:
        return 0.0
