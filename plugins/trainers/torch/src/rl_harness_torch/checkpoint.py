"""Checkpoints: a Hugging Face model folder, with the optimizer's state beside the weights when training goes on.

A folder appears under its name only when every byte of it is on the disk.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from rl_harness.contracts import OptimizerSpec
from rl_harness.errors import BackendError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_harness_torch import tensors as files

FORMAT = 1
MANIFEST = "trainer.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
#: What describes a model besides its weights: config, generation config, tokenizer, chat template, licence.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_NOT_COPIED = frozenset({MANIFEST, "model.safetensors.index.json", "pytorch_model.bin.index.json"})


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``steps`` is the optimizer's count, None when its state was not saved."""

    format: int
    version: int
    steps: int | None
    optimizer: OptimizerSpec


def save(
    path: Path, *, source: Path, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], manifest: Manifest
) -> None:
    """Write a checkpoint folder, replacing one of the same name only by a complete one.

    Raises ``BackendError`` when the disk is full or refuses; what was there before stays.
    """
    path = path.absolute()
    staging = path.with_name(f".{path.name}.part")
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*weights.values(), *moments.values()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if staging.exists():  # left by a process that was killed while saving this one
            shutil.rmtree(staging)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        staging.mkdir()
        _copy_description(source, staging)
        files.write(staging / WEIGHTS, weights)
        if moments:
            files.write(staging / OPTIMIZER, moments)
        _write_text(staging / MANIFEST, msgspec.json.encode(manifest))
        _sync_folder(staging)
        _put(staging, path)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise BackendError(
            f"checkpoint {path} was not saved ({size / 1e9:.2f} GB): {error.strerror or error}",
            remedy="free space there or choose another runs_dir; earlier checkpoints are untouched" if full else None,
        ) from error


def read_manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BackendError(f"{path} is not a checkpoint of this backend: it has no {MANIFEST}") from None
    except (msgspec.MsgspecError, OSError) as error:
        raise BackendError(f"{path / MANIFEST} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise BackendError(
            f"{path} is a checkpoint of format {manifest.format}, this version reads format {FORMAT}",
            remedy="load it with the version of rl-harness-torch that wrote it",
        )
    return manifest


def names(path: Path) -> frozenset[str]:
    """The names of the tensors in a file."""
    with _opened(path) as file:
        return frozenset(file.keys())


def read_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file. Raises ``BackendError`` unless they have the names and shapes of ``expected``."""
    with _opened(path) as file:
        if odd := sorted(set(file.keys()) ^ set(expected)):
            raise BackendError(f"{path} does not fit this model: {odd[0]} is on one side only")
        loaded = {name: file.get_tensor(name) for name in expected}
    for name, tensor in loaded.items():
        if tensor.shape != expected[name].shape:
            raise BackendError(
                f"{path} does not fit this model: {name} has shape {tuple(tensor.shape)}, "
                f"not {tuple(expected[name].shape)}"
            )
    return loaded


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise BackendError(f"{path} is missing, so training cannot go on from there") from None
    except (SafetensorError, OSError) as error:
        raise BackendError(f"{path} is damaged: {error}", remedy="continue from an earlier checkpoint") from None


def _copy_description(source: Path, target: Path) -> None:
    names = {file.name for pattern in _COPIED for file in source.glob(pattern) if file.is_file()} - _NOT_COPIED
    for name in sorted(names):
        if name == "config.json":
            config: dict[str, Any] = json.loads((source / name).read_bytes())
            config.pop("torch_dtype", None)
            config["dtype"] = str(torch.float32).removeprefix("torch.")  # masters are saved, whatever was loaded
            _write_text(target / name, json.dumps(config, indent=2).encode())
        else:
            _write_text(target / name, (source / name).read_bytes())


def _write_text(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(staging: Path, path: Path) -> None:
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        staging.rename(path)
        shutil.rmtree(old)
    else:
        staging.rename(path)
    _sync_folder(path.parent)
