"""What this machine remembers of snapshots beside what their provider does: when each was last used, and how often.

One small file a snapshot, in a folder a provider. How many sandboxes use a snapshot now is never stored: it is counted
from the provider's list.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from rl_harness.errors import Unavailable
from rl_harness.locks import Lock, is_held
from rl_harness.private import private_folder

#: A use is written down at most this often, in seconds.
_RESOLUTION = 60.0
_PATIENCE = 2.0


class Use(msgspec.Struct, kw_only=True):
    """``hits`` counts sandboxes started from it; ``build_seconds`` is what making it took, None if made elsewhere."""

    snapshot: str
    last_used: float
    hits: int = 0
    build_seconds: float | None = None


def state_folder() -> Path:
    """``$XDG_STATE_HOME/rl-harness/environments``, or a folder of this user's below the temporary directory."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    shared = Path(tempfile.gettempdir()) / f"rl-harness-{os.geteuid()}"
    for candidate in (home / "rl-harness", shared):
        folder = candidate / "environments"
        with contextlib.suppress(OSError):
            if candidate == shared:
                private_folder(shared)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if candidate.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK):
                return folder
    raise Unavailable(
        f"no folder for what is known of prepared environments: neither {home} nor {shared} can be written",
        remedy="set XDG_STATE_HOME to one that can",
    )


class Usage:
    """The records of one provider's snapshots. Losing them costs nothing but an early or late pruning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Use] = {}
        self._written: dict[str, float] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def lock(self, key: str) -> Lock:
        """What a process holds while it builds the environment of that key; the kernel drops it at its death."""
        return Lock(self._folder / f"{key}.build")

    def built(self, snapshot: str, seconds: float) -> None:
        self._pending[snapshot] = Use(snapshot=snapshot, last_used=time.time(), build_seconds=seconds)
        self._write(snapshot)

    def used(self, snapshot: str) -> None:
        use = self._pending.setdefault(snapshot, Use(snapshot=snapshot, last_used=0.0))
        use.last_used, use.hits = time.time(), use.hits + 1
        if use.last_used - self._written.get(snapshot, 0.0) > _RESOLUTION:
            self._write(snapshot)

    def flush(self) -> None:
        """Write down what is not yet, waiting a moment for another process that does the same. Blocking."""
        for snapshot in list(self._pending):
            self._write(snapshot, patience=_PATIENCE)

    def of(self, snapshot: str) -> Use | None:
        try:
            return msgspec.json.decode(self._file(snapshot).read_bytes(), type=Use)
        except (OSError, msgspec.DecodeError):
            return None

    def forget(self, snapshot: str) -> None:
        for suffix in (".json", ".lock"):
            self._file(snapshot).with_suffix(suffix).unlink(missing_ok=True)

    def sweep(self, snapshots: Collection[str]) -> None:
        """Forget all others than ``snapshots``, and the locks of builds that are over."""
        for file in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                use = msgspec.json.decode(file.read_bytes(), type=Use)
                if use.snapshot not in snapshots:
                    self.forget(use.snapshot)
        for file in self._folder.glob("*.build"):
            if not is_held(file):
                # Whoever opened it just now and locks it after this builds once more than need be, and no worse.
                file.unlink(missing_ok=True)

    def _file(self, snapshot: str) -> Path:
        return self._folder / f"{hashlib.sha256(snapshot.encode()).hexdigest()[:32]}.json"

    def _write(self, snapshot: str, patience: float = 0.0) -> None:
        """Add what is pending to what is on disk. On a full disk it stays pending: nothing depends on it."""
        use, file = self._pending[snapshot], self._file(snapshot)
        with contextlib.suppress(OSError):
            lock = Lock(file.with_suffix(".lock"))
            if not lock.acquire(patience=patience):
                return
            try:
                if before := self.of(snapshot):
                    use.hits += before.hits
                    use.build_seconds = before.build_seconds if use.build_seconds is None else use.build_seconds
                temporary = file.with_suffix(f".{os.getpid()}")
                temporary.write_bytes(msgspec.json.encode(use))
                temporary.replace(file)
            finally:
                lock.release()
            del self._pending[snapshot]
            self._written[snapshot] = time.time()
