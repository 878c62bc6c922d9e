from __future__ import annotations

import pytest
from rl_harness.rollout.harnesses.fences import opens_shell_block, shell_blocks, without_shell_blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```bash\nls\n```", ["ls"]),
        ("```sh\nls\n```", ["ls"]),
        ("```shell\nls\n```", ["ls"]),
        ("Look: ```bash\nls\n``` and wait", ["ls"]),
        ("```bash\necho 5 > answer.txt```", ["echo 5 > answer.txt"]),
        ("```bash\r\nls\r\n```", ["ls"]),
        ("```bash\n```", [""]),
        ("```bash\na\n```\n```sh\nb\n```", ["a", "b"]),
        ("```bash\na\n```\n```bash\nb", ["a"]),
        ("```bash\nls", []),
        ("```\nls\n```", []),
        ("```python\nprint()\n```", []),
        ("```bashful\nls\n```", []),
        ("```bash\ncat > a.md <<'E'\n```python\nx\nE\n```", ["cat > a.md <<'E'\n```python\nx\nE"]),
        ("````bash\ncat > a.md <<'E'\n```\nx\n```\nE\n````", ["cat > a.md <<'E'\n```\nx\n```\nE"]),
        ("run ``bash`` now", []),
    ],
)
def test_blocks_of_a_reply(text, blocks):
    assert shell_blocks(text) == blocks


@pytest.mark.parametrize(
    ("text", "opens"),
    [("```bash\nls", True), ("```bash", True), ("```python\nls", False), ("no fence", False), ("```bashful\n", False)],
)
def test_an_opening_without_its_end_is_seen(text, opens):
    assert opens_shell_block(text) is opens


def test_prose_around_blocks():
    assert without_shell_blocks("First look.\n```bash\nls\n```") == "First look."
