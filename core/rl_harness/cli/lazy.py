"""A click group that knows its commands' names and summaries and imports a command only when it is used."""

from __future__ import annotations

import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """``commands_at`` maps a command's name to ``"module:attr"`` and its one-line summary."""

    def __init__(self, *args: Any, commands_at: dict[str, tuple[str, str]], **extra: Any) -> None:
        super().__init__(*args, **extra)
        self._commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._commands_at:
            return None
        module, _, attribute = self._commands_at[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._commands_at and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, self._commands_at, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._commands_at.items()])
