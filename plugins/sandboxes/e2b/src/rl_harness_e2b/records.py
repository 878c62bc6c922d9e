"""What is known of snapshots. E2B lists their names, which carry key and time; this machine keeps labels and the like,
in a file for each, written before E2B is asked for the snapshot so that none is without one."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rl_harness.errors import SandboxError

_PREFIX = "rl-harness-snapshot"
_SANDBOX = "sandbox"
_NAME = re.compile(rf"{_PREFIX}-([0-9a-f]{{8}})[0-9a-f]{{8}}(?:-([a-z0-9_]{{1,80}}))?")
_PLAIN_KEY = re.compile(r"[a-z0-9_]{1,80}")


class Record(msgspec.Struct, kw_only=True):
    """``system``: the processes of E2B's own in the machine that was frozen, as that machine's boot named them.
    ``doomed``: deleted as far as anybody else is concerned; E2B keeps it while sandboxes use it."""

    key: str = ""
    labels: dict[str, str] = {}
    created_at: float = 0.0
    system: list[str] = []
    doomed: bool = False


def new_name(key: str) -> str:
    """A name that E2B accepts and nobody has used, with the time, and the key where it is as plain as a digest."""
    name = f"{_PREFIX}-{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"
    return f"{name}-{key}" if _PLAIN_KEY.fullmatch(key) else name


def own_name(snapshot: str) -> str | None:
    """The name that :func:`new_name` made, of a snapshot's id such as ``team/NAME:default``; None for another's."""
    name = snapshot.rpartition("/")[2].partition(":")[0]
    return name if _NAME.fullmatch(name) else None


class Records:
    """One JSON file for each snapshot and running sandbox, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, record: Record) -> None:
        self._write(name, msgspec.json.encode(record))

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self._folder / f".{name}.{secrets.token_hex(4)}"
            new.write_bytes(content)
            new.replace(self._folder / f"{name}.json")
        except OSError as error:
            raise SandboxError(
                f"what is known of sandboxes at E2B cannot be written to {self._folder}: {error.strerror}",
                remedy="make room there, or name another folder with -o sandbox.state_dir=DIR",
            ) from None

    def new(self, name: str, key: str, labels: Mapping[str, str], system: list[str]) -> None:
        self.write(name, Record(key=key, labels=dict(labels), created_at=time.time(), system=system))

    def read(self, name: str) -> Record:
        """What was written, or as much as the name tells."""
        found = _NAME.fullmatch(name)
        known = Record(key=found[2] or "", created_at=float(int(found[1], 16))) if found else Record()
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            known = msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=Record)
        return known

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def doom(self, name: str) -> None:
        record = self.read(name)
        record.doomed = True
        self.write(name, record)

    def keep_system(self, sandbox: str, system: Sequence[str]) -> None:
        """Note E2B's own processes in a running sandbox, for who finds it again."""
        self._write(f"{_SANDBOX}-{sandbox}", msgspec.json.encode(system))

    def system(self, sandbox: str) -> list[str]:
        """What was noted; nothing where that was on another machine."""
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            return msgspec.json.decode((self._folder / f"{_SANDBOX}-{sandbox}.json").read_bytes(), type=list[str])
        return []

    def forget_system(self, sandbox: str) -> None:
        self.remove(f"{_SANDBOX}-{sandbox}")

    def sandboxes(self) -> list[str]:
        """Those of which something is noted."""
        return sorted(file.stem.removeprefix(f"{_SANDBOX}-") for file in self._folder.glob(f"{_SANDBOX}-*.json"))

    def names(self) -> list[str]:
        return sorted(file.stem for file in self._folder.glob(f"{_PREFIX}-*.json"))


def state_home() -> Path:
    home = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    return home / "rl-harness" / "e2b-snapshots"
