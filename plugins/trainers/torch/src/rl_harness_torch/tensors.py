"""Tensors in files: the safetensors layout, a digest of many tensors, and a writer that skips the page cache.

Checkpoints are gigabytes that nobody reads soon, so pushing them through the page cache only costs time and memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: torch's dtypes by their safetensors names.
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BUFFER = 16 << 20
_BLOCK = 4096


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype, such as ``F32``."""
    return _NAMES[dtype]


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The head of a safetensors file that holds ``tensors``, and each one's byte range in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ranges = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        ranges[name] = (offset, offset + size)
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: (len(head) + a, len(head) + b) for name, (a, b) in ranges.items()}


def raw(tensor: Tensor) -> memoryview:
    """The tensor's little-endian bytes, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(array)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes, dtypes and bytes that finds torn or mixed-up weights (it is not cryptographic)."""
    largest_first = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # whoever wants a digest waits for it
        sums = dict(
            zip(largest_first, pool.map(lambda name: zlib.crc32(raw(tensors[name])), largest_first), strict=True)
        )
    whole = hashlib.sha256()
    for name, tensor in tensors.items():
        whole.update(f"{name} {tuple(tensor.shape)} {_NAMES[tensor.dtype]} {sums[name]}\n".encode())
    return whole.hexdigest()


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and wait until it is on the disk. Raises ``OSError``, leaving a part behind."""
    head, _ = header(tensors)
    descriptor = _open_direct(path)
    try:
        with mmap.mmap(-1, _BUFFER) as buffer:  # page-aligned, as direct writes must be
            filled = total = 0
            for piece in (memoryview(head), *(raw(tensor) for tensor in tensors.values())):
                position = 0
                while position < len(piece):
                    count = min(len(piece) - position, _BUFFER - filled)
                    buffer[filled : filled + count] = piece[position : position + count]
                    filled += count
                    position += count
                    if filled == _BUFFER:
                        _write_all(descriptor, memoryview(buffer))
                        total += filled
                        filled = 0
            padded = filled + -filled % _BLOCK
            _write_all(descriptor, memoryview(buffer)[:padded])
            os.ftruncate(descriptor, total + filled)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o644)
    except FileExistsError:
        raise
    except OSError:  # a file system without direct writes, such as tmpfs on older kernels
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o644)


def _write_all(descriptor: int, data: memoryview) -> None:
    with data:
        while len(data):
            written = os.write(descriptor, data)
            data = data[written:]
