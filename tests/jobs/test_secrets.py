"""A secret that a model says in a run: in no file of the run, and counted in its reports."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from rl_harness.jobs.model import known_secrets
from rl_harness.runs.config import PluginChoice, RunConfig

TOKEN = "tok_9f8e7d6c5b4a39281706"


def test_a_run_keeps_no_secret(world) -> None:
    world.question("ask", "4")
    world.environment["DEPLOY_TOKEN"] = TOKEN
    world.environment["DECLARED"] = "word-1-of-4"
    said = f"engine.replies=['the token is {TOKEN}, and word-1-of-4']"
    report = world.json(
        "run", "tasks/ask", *world.scripted, "--harness", "chat", "-o", said, "-o", "secrets=['DECLARED']"
    )
    assert report["evaluations"][0]["summary"]["flags"] == {"secrets": 1}
    run = world.directory / report["path"]
    assert "flags: secrets 1" in world.run("runs", "show", report["path"])
    shown = world.run("runs", "show", report["path"], "--task", "ask")
    assert "held a secret (DEPLOY_TOKEN, DECLARED): kept without ids, and not trained on" in shown
    assert "the token is [redacted: DEPLOY_TOKEN], and [redacted: DECLARED]" in shown
    # The engine's script is the user's own and stands in the configuration; what is recorded does not have it.
    assert TOKEN not in (run / "run.log").read_text()
    with closing(sqlite3.connect(f"file:{run / 'db.sqlite'}?mode=ro", uri=True)) as db:
        for table in ("episodes", "turns", "events"):
            assert TOKEN not in str(db.execute(f"select * from {table}").fetchall())


def test_variables_that_options_name_are_secrets(monkeypatch) -> None:
    for name in ("MY_KEY", "OTHER", "PLAIN", "ENGINE_AUTH"):
        monkeypatch.setenv(name, f"value-of-{name}-1")
    config = RunConfig(
        api_key_env="MY_KEY",
        secrets=("OTHER",),
        engine=PluginChoice.model_validate({"name": "api", "api_key_env": "ENGINE_AUTH", "retries": 3}),
    )
    secrets = known_secrets(config)
    found = secrets.find(" ".join(f"value-of-{name}-1" for name in ("MY_KEY", "OTHER", "PLAIN", "ENGINE_AUTH")))
    assert sorted(found) == ["ENGINE_AUTH", "MY_KEY", "OTHER"]


def test_options_that_hold_variables_are_not_taken_for_their_names() -> None:
    table = PluginChoice.model_validate(
        {"name": "some", "install_env": {"HTTPS_PROXY": "http://proxy"}, "no_env": None}
    )
    known_secrets(RunConfig(harness=table, engine=PluginChoice.model_validate({"name": "api", "more_env": ["A"]})))
