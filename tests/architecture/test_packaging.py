"""What the packaging promises: one command installs everything, with every version pinned."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/*/pyproject.toml"))]
LAYOUT = re.compile(r"plugins/[a-z]+/[a-z0-9_-]+/pyproject\.toml")


def project(file: Path) -> dict:
    return tomllib.loads(file.read_text("utf-8"))["project"]


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text("utf-8").splitlines() if line and not line.startswith("#")]


def pinned() -> dict[str, str]:
    pins = {}
    for line in lines("constraints.txt"):
        name, _, version = line.partition("==")
        pins[canonicalize_name(name)] = version
    return pins


def wanted() -> list[Requirement]:
    """What installing dev.txt asks for directly, extras resolved, and the build tools."""
    wanted = [Requirement(line) for line in lines("dev.txt") if not line.startswith("-e")]
    wanted += [Requirement("hatchling"), Requirement("editables")]
    for file in PROJECTS:
        data = project(file)
        for group in (data["dependencies"], *data.get("optional-dependencies", {}).values()):
            wanted += map(Requirement, group)
    return [requirement for requirement in wanted if not canonicalize_name(requirement.name).startswith("rl-harness")]


def test_dev_txt_lists_the_core_and_every_plugin() -> None:
    editable = {line.removeprefix("-e ").partition("[")[0] for line in lines("dev.txt") if line.startswith("-e ")}
    assert editable == {str(file.parent.relative_to(ROOT)) for file in PROJECTS}


def test_constraints_pin_exact_versions() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line) for line in lines("constraints.txt"))


def test_metadata_gives_ranges_and_never_pins() -> None:
    for file in PROJECTS:
        for text in project(file)["dependencies"]:
            assert not any(s.operator in ("==", "===") for s in Requirement(text).specifier), f"{file}: {text}"


@pytest.mark.parametrize("file", PROJECTS, ids=lambda file: file.parent.name)
def test_every_dependency_is_used(file: Path) -> None:
    folder = ROOT / "core" if file.parent == ROOT else file.parent / "src"
    words = {word for code in folder.rglob("*.py") for word in re.findall(r"\w+", code.read_text("utf-8"))}
    names = {Requirement(text).name.replace("-", "_") for text in project(file)["dependencies"]}
    assert names <= words, f"declared and not used: {sorted(names - words)}"


def test_everything_that_gets_installed_is_pinned() -> None:
    """Follows the requirements of installed distributions, so that nothing floats below the surface."""
    pins = pinned()
    queue, seen, missing = list(wanted()), set(), set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in pins:
            missing.add(name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            found = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in found:
            child = Requirement(text)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                child.marker = None
                queue.append(child)
    assert not missing


def test_pins_satisfy_the_ranges_of_the_metadata() -> None:
    pins = pinned()
    for requirement in wanted():
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), str(requirement)


def test_distributions_are_named_after_their_place_and_share_a_licence() -> None:
    for file in PROJECTS[1:]:
        assert LAYOUT.fullmatch(str(file.relative_to(ROOT)))
        data = project(file)
        assert data["name"] == f"rl-harness-{file.parent.name.replace('_', '-')}"
        assert data["license"] == "Apache-2.0"
        assert (file.parent / "README.md").is_file()
        assert (file.parent / "tests").is_dir()


def test_the_list_of_known_plugins_is_current() -> None:
    code = "import sys; sys.path.insert(0, 'tools'); import known_plugins; sys.stdout.write(known_plugins.generate())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    current = (ROOT / "core" / "rl_harness" / "known_plugins.json").read_text("utf-8")
    assert current == done.stdout, "run: python tools/known_plugins.py"


def test_continuous_integration_requires_every_service_that_tests_know(pytestconfig: pytest.Config) -> None:
    required = re.search(r'RL_HARNESS_REQUIRE="([^"]*)"', (ROOT / ".ci" / "run").read_text("utf-8"))
    assert required is not None
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    assert set(required.group(1).split(",")) == set(conftest.PROBES)
