"""Writes tests/architecture/public_api.txt, the names that users and plugin authors may rely on.

A test compares the file with the code, so that every change of the public interface shows in a diff. After a change
that is meant: python tools/public_api.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

TARGET = Path(__file__).resolve().parents[1] / "tests" / "architecture" / "public_api.txt"
MODULES = (
    "rl_harness",
    "rl_harness.contracts",
    "rl_harness.records",
    "rl_harness.testing",
    "rl_harness.errors",
    "rl_harness.learning",
    "rl_harness.sandboxes.remote",
    "rl_harness.rollout.harnesses.python",
)


def describe() -> str:
    lines = ["# Written by tools/public_api.py; a test compares it with the code."]
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines += ["", f"[{module_name}]"]
        for name in sorted(module.__all__):
            lines += _about(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def _about(name: str, value: object) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{name}: {', '.join(value.__all__)}"
        return
    if not inspect.isclass(value):
        yield f"{name}{_signature(value) if inspect.isfunction(value) else ''}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"{name}({bases})" if bases else name
    if issubclass(value, BaseException | BaseModel) or dataclasses.is_dataclass(value):
        return
    for member, what in sorted(vars(value).items()):
        if member.startswith("_"):
            continue
        if inspect.isfunction(what):
            yield f"    {'async ' if inspect.iscoroutinefunction(what) else ''}{member}{_signature(what)}"
        else:
            yield f"    {member}"


def _signature(function: object) -> str:
    assert callable(function)
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


if __name__ == "__main__":
    TARGET.write_text(describe(), "utf-8")
    print(f"wrote {TARGET}")
