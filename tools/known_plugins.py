"""Writes core/rl_harness/known_plugins.json: for every name our own plugin packages register, the package.

The core uses it in error texts only. Run it after adding a plugin: python tools/known_plugins.py
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "core" / "rl_harness" / "known_plugins.json"


def generate(root: Path = ROOT) -> str:
    """The file's text, from ``plugins/*/*/pyproject.toml`` and the hook modules these name."""
    sys.path.insert(0, str(root / "core"))
    from rl_harness.discovery import EntryPoint
    from rl_harness.kinds import KINDS
    from rl_harness.plugins import Registry

    points = []
    for project_file in sorted(root.glob("plugins/*/*/pyproject.toml")):
        project = tomllib.loads(project_file.read_text("utf-8"))["project"]
        sys.path.insert(0, str(project_file.parent / "src"))
        for name, target in project["entry-points"]["rl_harness"].items():
            points.append(EntryPoint(name, target, project["name"], project["version"]))
    registry = Registry(points)
    problems = [f"{plugin.label}: {problem}" for plugin in registry.plugins() for problem in plugin.problems]
    if problems:
        raise SystemExit("\n".join(problems))
    table = {
        kind: {entry.name: entry.plugin.distribution for entry in sorted(registry.entries(kind), key=lambda e: e.name)}
        for kind in KINDS
    }
    return json.dumps(table, indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(generate(), "utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
