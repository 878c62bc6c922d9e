"""Writing weights for engines: safetensors files on a memory file system, reused from one version to the next."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from rl_harness.contracts import TensorInfo, WeightManifest
from rl_harness.errors import BackendError
from torch import Tensor

from rl_harness_torch import tensors as files
from rl_harness_torch.weight_files import FILE, LOCK, PREFIX, reap


class _Slot:
    """One folder with a preallocated file, mapped into memory."""

    def __init__(self, base: Path, tensors: Mapping[str, Tensor]) -> None:
        head, ranges = files.header(tensors)
        size = max([len(head), *(end for _, end in ranges.values())])
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock = -1
        try:
            self._lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            path = self.folder / FILE
            with path.open("xb") as file:
                _allocate(file.fileno(), size)
            whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            whole[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            self.views = {
                name: whole[start:end].view(tensors[name].dtype).view(tensors[name].shape)
                for name, (start, end) in ranges.items()
            }
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self.views = {}
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space now: writing to a mapped file on a full file system kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


class WeightFolders:
    """The folders of one trainer process. ``bases`` are tried in order."""

    def __init__(self, bases: tuple[Path, ...] | None = None) -> None:
        self.bases = bases if bases is not None else (Path("/dev/shm"), Path(tempfile.gettempdir()))
        self._free: list[_Slot] = []
        self._used: dict[Path, _Slot] = {}
        for base in self.bases:
            reap(base)

    def write(self, tensors: Mapping[str, Tensor], version: int) -> tuple[Path, WeightManifest]:
        """A folder with ``tensors``, each in its dtype. Raises ``BackendError`` when there is no room for it."""
        slot = self._free.pop() if self._free else self._new(tensors)
        with torch.no_grad():
            for name, view in slot.views.items():
                view.copy_(tensors[name])
        self._used[slot.folder] = slot
        manifest = WeightManifest(
            version=version,
            kind="full",
            tensors=tuple(
                TensorInfo(name=name, shape=tuple(view.shape), dtype=files.dtype_name(view.dtype))
                for name, view in slot.views.items()
            ),
            digest=files.digest(slot.views),
        )
        return slot.folder, manifest

    def release(self, folder: Path) -> None:
        """Nobody reads it any more; one is kept to be written again, since new memory costs more than the copy."""
        slot = self._used.pop(folder, None)
        if slot is None:
            return
        if self._free:
            slot.remove()
        else:
            self._free.append(slot)

    def close(self) -> None:
        for slot in (*self._free, *self._used.values()):
            slot.remove()
        self._free, self._used = [], {}

    def _new(self, tensors: Mapping[str, Tensor]) -> _Slot:
        problems = []
        for base in self.bases:
            if not base.is_dir():
                problems.append(f"{base} does not exist")
                continue
            try:
                return _Slot(base, tensors)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
                    raise
                problems.append(f"{base}: {os.strerror(error.errno)}")
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise BackendError(
            f"no room for {size / 1e9:.2f} GB of weights on their way to the engine ({'; '.join(problems)})",
            remedy="free space there, or set TMPDIR to a folder on a larger disk",
        )
