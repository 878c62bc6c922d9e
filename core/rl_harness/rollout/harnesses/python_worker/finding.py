"""Find what a target names: ``module:attribute``, or an agent marked with ``@rl_harness.agent``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from .failures import describe, full_traceback

#: The attribute that the decorator leaves on an agent.
MARK = "__rl_harness_agent__"


class Missing(Exception):
    """The target cannot be called; ``message`` is what the harness is told."""

    def __init__(self, what: str, error: str, **details: Any) -> None:
        super().__init__(error)
        self.message = {"op": "missing", "what": what, "error": error, **details}


def find(target: str) -> Any:
    """What ``module:attribute`` names; where there is no such attribute, the marked agent of that name in the module or
    below it; for ``module`` alone, its only marked agent. Raises :class:`Missing`."""
    name, _, attribute = target.partition(":")
    module = _import(name, name)
    found: Any = module
    for part in attribute.split(".") if attribute else ():
        if not hasattr(found, part):
            break
        found = getattr(found, part)
    else:
        if attribute:
            return found
    marked = _marked(module)
    if not attribute:
        if len(marked) != 1:
            several = f"has several agents: {', '.join(sorted(marked))}; name one" if marked else "marks no agent"
            raise Missing("agents", several, names=sorted(marked))
        return next(iter(marked.values()))
    if attribute in marked:
        return marked[attribute]
    names = [n for n in dir(found) if not n.startswith("_") and not isinstance(getattr(found, n), ModuleType)]
    raise Missing("function", part, names=sorted({*names, *marked}))


def _import(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except BaseException as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{target}.".startswith(f"{absent}."):
            raise Missing("module", str(error)) from None
        raise Missing("import", describe(error), traceback=full_traceback(error)) from None


def _marked(module: ModuleType) -> dict[str, Any]:
    """The marked agents of a module by name, and of a package's modules that mention rl-harness: only these can have
    any, and importing all the others could do anything."""
    found: dict[str, Any] = {}
    for each in (module, *_modules_below(module)):
        for value in list(vars(each).values()):
            name = getattr(value, "__dict__", {}).get(MARK)
            if isinstance(name, str) and found.setdefault(name, value) is not value:
                raise Missing("agents", f"has two agents named {name!r}")
    return found


def _modules_below(package: ModuleType) -> list[ModuleType]:
    folders = getattr(package, "__path__", ())
    return [_import(name, "") for name in _mentioning(folders, f"{package.__name__}.")]


def _mentioning(folders: Iterable[str], prefix: str) -> Iterator[str]:
    """Names of the modules in these folders, and below them, whose source mentions rl-harness."""
    for info in pkgutil.iter_modules(list(folders), prefix):
        spec: Any = info.module_finder.find_spec(info.name, None)
        if spec is None or info.name.endswith(".__main__"):
            continue
        source = spec.loader.get_source(info.name) if hasattr(spec.loader, "get_source") else None
        if "rl_harness" in (source or ""):
            yield info.name
        yield from _mentioning(spec.submodule_search_locations or (), f"{info.name}.")
