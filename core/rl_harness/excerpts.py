"""Shortens text that people have to understand: what it is about stands at its beginning, the reason at its end."""

from __future__ import annotations


def excerpt(text: str, most: int) -> str:
    """``text``, or its first quarter and its last three of ``most`` characters, with how many were left out between."""
    if len(text) <= most:
        return text
    head = most // 4
    left_out = f"[... {len(text) - most} characters left out ...]"
    if "\n" in text:
        left_out = f"\n{left_out}\n"
    return f"{text[:head]}{left_out}{text[len(text) - (most - head) :]}"


def printable_lines(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


def printable(line: str) -> str:
    """A line without what would command a terminal: what programs print is anybody's."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line)
