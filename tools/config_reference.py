"""Writes the table of keys in docs/configuration.md, between its two markers; a test checks that it is current.

python tools/config_reference.py
"""

from __future__ import annotations

import json
from pathlib import Path

from rl_harness.runs.config import RunConfig
from rl_harness.runs.keys import field_of, known_keys

TARGET = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
START, END = "<!-- keys: written by tools/config_reference.py -->\n", "<!-- end of keys -->\n"


def table() -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key in known_keys():
        field = field_of(key)
        default, meaning = field.default, field.description
        if key[-1] == "name" and len(key) == 2:  # the choice of a plugin: described where it is chosen
            choice = RunConfig.model_fields[key[0]]
            default, meaning = choice.default.name, choice.description
        shown = "unset" if default is None else json.dumps(list(default) if default == () else default, default=str)
        rows.append(f"| `{'.'.join(key)}` | `{shown}` | {meaning} |")
    return "\n".join(rows) + "\n"


def updated(text: str) -> str:
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{table()}{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(updated(TARGET.read_text("utf-8")), "utf-8")
    print(f"wrote {TARGET}")
