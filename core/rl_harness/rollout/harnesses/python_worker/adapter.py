"""Load what turns an agent of a framework into a function of a task: a package of a plugin, given by its folder.

The interpreter may be another environment's, without that package: it is imported from where the harness has it, under
its own name, so that the agent's code can import it as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any


def load_adapter(adapter: dict[str, Any]) -> Callable[[Any, dict[str, Any]], Callable[[Any], Any]]:
    """The function ``adapt(found, options)`` of the adapter's module."""
    adapt: Callable[[Any, dict[str, Any]], Callable[[Any], Any]] = importlib.import_module(adapter["module"]).adapt
    return adapt


def provide(adapter: dict[str, Any]) -> None:
    """Make the adapter's package importable, whatever the interpreter has under its name."""
    folder = adapter["folder"]
    name = os.path.basename(folder)  # noqa: PTH119  pathlib would double the start-up time
    file = os.path.join(folder, "__init__.py")  # noqa: PTH118  see above
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
