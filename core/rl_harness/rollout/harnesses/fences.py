"""Find the shell commands in a model's reply that are written as fenced code blocks."""

from __future__ import annotations

import re

# An opening fence may follow other text, as small models write it. The closing fence is at least as long as the
# opening one and followed by white space or the end, so that a nested "```python" does not close a block.
_BLOCK = re.compile(r"(?<!`)(`{3,})(?:bash|sh|shell)[ \t]*\r?\n(.*?)\1`*(?=\s|\Z)", re.DOTALL)
_OPENING = re.compile(r"(?<!`)`{3,}(?:bash|sh|shell)[ \t]*(?:\r?\n|\Z)")


def shell_blocks(text: str) -> list[str]:
    """The bodies of all closed ```` ```bash ````, ```` ```sh ```` and ```` ```shell ```` blocks, in order."""
    return [match.group(2).strip("\r\n") for match in _BLOCK.finditer(text)]


def opens_shell_block(text: str) -> bool:
    """Whether a shell block begins anywhere in the text, closed or not."""
    return _OPENING.search(text) is not None


def without_shell_blocks(text: str) -> str:
    """The prose around the blocks."""
    return _BLOCK.sub("", text).strip()
