"""``rl-harness config``: the configuration in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rl_harness.cli.options import (
    configuration_options,
    debug_option,
    echo_json,
    echo_settings,
    json_option,
    resolve_configuration,
    settings_json,
)


@click.group()
def config() -> None:
    """Show the configuration and where each value comes from."""


@config.command()
@configuration_options
@json_option
@debug_option
def show(
    targets: tuple[str, ...],
    options: tuple[str, ...],
    plugin_files: tuple[Path, ...],
    config_path: Path | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Print every value that a run with the same arguments would use, and its origin."""
    resolved = resolve_configuration(targets, options, plugin_files, config_path, flags, strict=False)
    if as_json:
        echo_json(settings_json(resolved))
    else:
        click.echo(f"file: {resolved.file or 'no rl-harness.toml here or above'}\n")
        echo_settings(resolved)
    return max((error.exit_code for error in resolved.errors), default=0)
