"""Which snapshots there are. Modal finds an image by its id but lists none, so that this machine keeps a file for each
snapshot that it made; whether Modal still has it is asked each time."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_harness.contracts.sandbox import SnapshotInfo
from rl_harness.errors import Unavailable

#: The form of an image's id.
IMAGE = re.compile(r"im-[A-Za-z0-9]+")


class SnapshotIndex:
    """One JSON file for each snapshot, in ``folder``. ``ttl``: seconds for which Modal is asked to keep one."""

    def __init__(self, folder: Path, ttl: int | None) -> None:
        self._folder = folder
        self.ttl = ttl

    def add(self, image: str, key: str, labels: Mapping[str, str]) -> None:
        record = {"key": key, "labels": dict(labels), "created_at": time.time()}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self._folder / f".{image}.new"
            new.write_text(json.dumps(record), "utf-8")
            os.replace(new, self._folder / f"{image}.json")  # noqa: PTH105 -- replace of pathlib is the same call
        except OSError as error:
            raise Unavailable(
                f"the list of Modal's snapshots in {self._folder} cannot be written: {error.strerror}",
                remedy="make room there, or name another folder with -o sandbox.state_dir=DIR",
            ) from None

    def remove(self, image: str) -> None:
        (self._folder / f"{image}.json").unlink(missing_ok=True)

    def find(self, labels: Mapping[str, str]) -> list[SnapshotInfo]:
        """The snapshots on record whose labels include ``labels``; unreadable files are left out."""
        found = []
        for file in sorted(self._folder.glob("im-*.json")):
            try:
                record: dict[str, Any] = json.loads(file.read_text("utf-8"))
                info = SnapshotInfo(
                    id=file.stem,
                    provider="modal",
                    key=str(record["key"]),
                    labels={str(name): str(value) for name, value in record["labels"].items()},
                    created_at=float(record["created_at"]),
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            if IMAGE.fullmatch(info.id) and labels.items() <= info.labels.items():
                found.append(info)
        return found
