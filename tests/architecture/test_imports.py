"""Imports point one way; the core needs neither torch nor Linux to be imported; plugins use public names only."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "rl_harness"
PLUGINS = sorted(ROOT.glob("plugins/*/*/pyproject.toml"))

#: The layers of the core, lowest first. A module may import from its own package and from lower layers only.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "hookspecs",
            "discovery",
            "excerpts",
            "hosts",
            "kinds",
            "locks",
            "mistakes",
            "private",
            "redaction",
            "shortages",
            "textfile",
        }
    ),
    frozenset({"agents", "digests"}),
    frozenset({"records"}),
    frozenset({"contracts"}),
    frozenset({"plugins"}),
    frozenset({"tasks", "sandboxes", "gateway", "inference", "learning", "runs"}),
    frozenset({"rollout", "reports", "online", "testing"}),
    frozenset({"jobs"}),
    frozenset({"cli"}),
)
#: Name their targets as text only, or are the package itself.
OUTSIDE = {"__init__", "__main__", "builtins"}

#: What plugins may import: each is the ``__all__`` of a module of the core.
PUBLIC = (
    "rl_harness",
    "rl_harness.contracts",
    "rl_harness.records",
    "rl_harness.testing",
    "rl_harness.errors",
    "rl_harness.learning",
    "rl_harness.sandboxes.remote",
    "rl_harness.rollout.harnesses.python",
)


def layer(part: str) -> int:
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def imports(file: Path, tree: ast.AST | None = None) -> Iterator[tuple[int, str, str | None]]:
    """Every import in a file (or what is left of its ``tree``), at any depth: line, module, the name taken from it."""
    for node in ast.walk(tree or ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            package = file.parents[node.level - 1].relative_to(ROOT).parts if node.level else ()
            start = [*package[package.index("rl_harness") :]] if "rl_harness" in package else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, module, alias.name


def part_of(module: str, name: str | None) -> str | None:
    """The part of the core that an import reaches, or None for the package's own top."""
    parts = module.split(".")
    if parts[0] != "rl_harness":
        return None
    if len(parts) > 1:
        return parts[1]
    return name if name and ((CORE / name).is_dir() or (CORE / f"{name}.py").is_file()) else None


def test_every_module_of_the_core_is_in_a_layer() -> None:
    parts = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert parts == OUTSIDE | {part for parts in LAYERS for part in parts}


def test_imports_point_one_way() -> None:
    wrong = []
    for file in sorted(CORE.rglob("*.py")):
        own = file.relative_to(CORE).parts[0].removesuffix(".py")
        if own in OUTSIDE:
            continue
        for line, module, name in imports(file):
            other = part_of(module, name)
            if other is not None and other != own and (other in OUTSIDE or layer(other) >= layer(own)):
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {own} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_of_the_core_import_each_other_in_a_circle() -> None:
    """Nor when a function that imports is called: a circle that is put off is one. What only types name may be."""
    files = dict(zip(modules(), core_files(), strict=True))
    graph = {module: imported_modules(file, files) - {module} for module, file in files.items()}
    circles = []
    while graph:
        done = [module for module, others in graph.items() if not others & graph.keys()]
        if not done:  # what is left is in circles, or leads to them; those that nothing left imports only lead there
            needed = set().union(*graph.values())
            if unneeded := graph.keys() - needed:
                done = list(unneeded)
            else:
                circles = sorted(graph)
                break
        for module in done:
            del graph[module]
    assert not circles, f"among these: {', '.join(circles)}"


def imported_modules(file: Path, known: Mapping[str, Path]) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for _, module, name in imports(file, tree):
        found |= {f"{module}.{name}"} & known.keys() or {module} & known.keys()
    return found


@pytest.mark.parametrize("project", PLUGINS, ids=lambda project: project.parent.name)
def test_plugins_import_only_public_names_of_the_core_and_what_they_depend_on(project: Path) -> None:
    data = tomllib.loads(project.read_text("utf-8"))["project"]
    ours = {tomllib.loads(other.read_text("utf-8"))["project"]["name"] for other in PLUGINS} | {"rl-harness"}
    depends = {name for name in ours if any(d.partition(">")[0].strip() == name for d in data["dependencies"])}
    own = {path.name for path in (project.parent / "src").iterdir()}
    wrong = []
    for file in sorted((project.parent / "src").rglob("*.py")):
        for line, module, name in imports(file):
            top = module.split(".")[0]
            if not top.startswith("rl_harness") or top in own:
                continue
            distribution = top.replace("_", "-")
            if distribution not in depends:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {module} belongs to {distribution}, not a dependency")
            elif top == "rl_harness" and not is_public(module, name):
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {module}.{name or ''} is not public")
    assert not wrong, "\n".join(wrong)


def is_public(module: str, name: str | None) -> bool:
    homes = [home for home in PUBLIC if module == home or module.startswith(f"{home}.")]
    if f"{module}.{name}" in PUBLIC:
        return True
    return name is None or any(name in importlib.import_module(home).__all__ for home in homes)


def core_files() -> list[Path]:
    return [file for file in sorted(CORE.rglob("*.py")) if file.stem != "__main__"]


def modules() -> list[str]:
    names = []
    for file in core_files():
        parts = file.relative_to(CORE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


IMPORT_ALL = """
import importlib, os, select, signal, socket, sys
# third parties and the standard library may look at the real platform; what follows is ours
import asyncio, ctypes, multiprocessing, subprocess, aiohttp, jinja2, msgspec, numpy, pydantic, rich
import pydantic.main, pydantic.types, tokenizers, httptools
for module, names in {{
    os: ("unshare", "setns", "memfd_create", "pidfd_open", "sched_setaffinity", "sched_getaffinity", "eventfd",
         "posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "sched_getscheduler", "getxattr", "setxattr",
         "P_PIDFD", "O_PATH", "O_TMPFILE"),
    select: ("epoll",), signal: ("pidfd_send_signal",), socket: ("AF_VSOCK", "AF_NETLINK", "SO_PEERCRED"),
}}.items():
    for name in names:
        module.__dict__.pop(name, None)
class Library:  # the C library of a system that lacks what only Linux has
    def __init__(self, name=None, **options):
        if name is not None:
            raise OSError(f"no library {{name}}")
    def __getattr__(self, name):
        raise AttributeError(f"no symbol {{name}}")
ctypes.CDLL = Library
sys.platform = "darwin"
for name in {names!r}:
    importlib.import_module(name)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "docker", "modal")))
"""


def test_the_core_imports_without_torch_and_without_linux() -> None:
    code = IMPORT_ALL.format(names=modules())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_no_module_of_the_core_mentions_torch_in_an_import() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in CORE.rglob("*.py")
        for line, module, _ in imports(file)
        if module.split(".")[0] in ("torch", "transformers", "safetensors")
    ]
    assert not found


def test_modules_named_by_entry_points_import_nothing_heavy() -> None:
    targets = ["rl_harness.builtins"]
    for project in PLUGINS:
        targets += tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"]["rl_harness"].values()
    for target in targets:
        code = f"import sys, {target}; print({{'pydantic', 'numpy', 'msgspec', 'torch', 'rich'}} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "set()\n", target


def test_every_registered_target_of_ours_can_be_imported() -> None:
    """A name in a list that does not load is worse than no name."""
    from rl_harness.plugins import load_registry

    registry = load_registry()
    problems = [f"{plugin.label}: {problem}" for plugin in registry.plugins() for problem in plugin.problems]
    assert not problems
    for plugin in registry.plugins():
        if plugin.distribution.startswith("rl-harness"):
            for entry in plugin.entries:
                registry.load(entry.kind, entry.full_name)
