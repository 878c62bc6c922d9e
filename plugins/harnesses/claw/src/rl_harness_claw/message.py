"""How an assistant with a workspace of its own is told where the task is."""

from __future__ import annotations

from rl_harness_cli_agents import Seat


def message(seat: Seat) -> str:
    """The instruction, after the directory that it is about: the workspace holds the assistant's own files."""
    return f"Work in the directory {seat.workdir}.\n\n{seat.instruction}"


def workspace(seat: Seat) -> str:
    return f"{seat.home}/workspace"
