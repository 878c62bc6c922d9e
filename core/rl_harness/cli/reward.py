"""``rl-harness reward``: say how well a live assistant did."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import click

from rl_harness.cli.options import debug_option, echo_json, json_option

KEY_VARIABLE = "RL_HARNESS_REWARD_KEY"
_SECONDS = 30.0


@click.command(context_settings={"ignore_unknown_options": True})  # so that -1.0 is a reward
@click.argument("url")
@click.argument("reward", type=float)
@click.option("--reward-key", metavar="KEY", help=f"The session's reward key; else ${KEY_VARIABLE} holds it.")
@click.option("--turn", metavar="ID", help="Reward one turn: the id of the turn, or of the reply as its client got it.")
@click.option("--name", metavar="NAME", help="One of several rewards for the same; --end says that it is the last.")
@click.option("--end", is_flag=True, help="Nothing more comes: the episode is over with the rewards it has.")
@click.option("--replace", is_flag=True, help="Change a reward that was given, if it was not trained on yet.")
@json_option
@debug_option
def reward(
    url: str,
    reward: float,
    reward_key: str | None,
    turn: str | None,
    name: str | None,
    end: bool,
    replace: bool,
    as_json: bool,
) -> int:
    """Send REWARD to the session at URL, which `rl-harness serve` told.

    It is for everything the session did since its last reward, and ends that episode; with --turn or --name the episode
    goes on.
    """
    from rl_harness.errors import RlHarnessError

    if not math.isfinite(reward):
        raise click.UsageError(f"a reward is a finite number, not {reward}")
    key = reward_key or os.environ.get(KEY_VARIABLE)
    if not key:
        raise click.UsageError(f"no key: give --reward-key, or set {KEY_VARIABLE}")
    given = {"turn": turn, "name": name, "end": end or None, "replace": replace or None}
    body = {"reward": reward} | {field: value for field, value in given.items() if value is not None}
    status, told = _post(url, key, body)
    if status != 200:
        message = told.get("error", {}).get("message") or f"status {status}"
        if as_json:
            echo_json({"status": status, **told})
        again = told.get("error", {}).get("code") == "already_rewarded"
        raise RlHarnessError(message, remedy="--replace does" if again else None)
    if as_json:
        echo_json(told)
        return 0
    closed = "episode over" if told["closed"] else "episode goes on"
    waiting = f", {told['waiting']} of {told['batch_size']} for the next update" if "waiting" in told else ""
    click.echo(f"session {told['session']}: reward {told['reward']:g}, {closed}{waiting}")
    return 0


def _post(url: str, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and answer of ``POST /rl/reward`` at an address with or without ``/v1``."""
    import urllib.error
    import urllib.request

    from rl_harness.errors import Unavailable

    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise click.UsageError(f"{url!r} is not an address such as http://127.0.0.1:8000/v1")
    request = urllib.request.Request(
        f"{root}/rl/reward",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return int(response.status), json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, _answer(error.read())
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise Unavailable(
            f"{root} does not answer: {getattr(error, 'reason', error)}", remedy="is rl-harness serve running there?"
        ) from error


def _answer(data: bytes) -> dict[str, Any]:
    try:
        told = json.loads(data)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
