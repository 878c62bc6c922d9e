"""The configuration of a run as a model: every key, its type, default and meaning. How values are found and
layered (command line, environment, file) is :mod:`rl_harness.runs.resolve`'s business.

Sections ``benchmark``, ``harness``, ``sandbox``, ``engine``, ``renderer``, ``backend``, ``trainer`` select a plugin by
``name``; their other keys are validated by that plugin's own options model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PluginChoice(BaseModel):
    """``name`` plus the plugin's own options, kept as given until the plugin is loaded."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def plugin_options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Sampling(Section):
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 is off")
    top_k: int = Field(0, ge=0, description="0 is off")
    max_tokens: int = Field(512, ge=1, description="completion tokens a turn")


class Evaluation(Section):
    """What a training run evaluates before, after, and every ``every`` steps."""

    split: str = Field("heldout", description="the split evaluated before and after training")
    limit: int | None = Field(100, ge=1, description="tasks; none is all")
    greedy: bool = Field(True, description="also evaluate at temperature 0")
    every: int = Field(0, ge=0, description="also every N steps; 0 is off")


class Training(Section):
    split: str = Field("train", description="the split trained on")
    steps: int = Field(8, ge=1, description="weight updates at most")
    tasks_per_step: int = Field(4, ge=1, description="groups in one update")
    group_size: int = Field(8, ge=1, description="episodes of one task in one update")
    learning_rate: float = Field(5e-5, gt=0, description="AdamW's, after warm-up")
    warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises linearly")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    stop_at_pass_rate: float | None = Field(
        0.97, gt=0, le=1, description="stop when two steps in a row pass this share of their episodes"
    )
    keep_checkpoints: int = Field(2, ge=1, description="the newest N stay on disk")
    allow_unisolated: bool = Field(False, description="train on results of a sandbox without isolation")
    allow_tampered: bool = Field(False, description="train on episodes flagged tampered")


class Snapshots(Section):
    """How environments are prepared."""

    use: bool = Field(True, description="prepare an environment once and start from a snapshot, where that pays")
    keep_days: float = Field(14, gt=0, description="`sandbox prune` removes what was not used for longer")
    allow_unisolated: bool = Field(
        False, description="run set-up steps where nothing is isolated, which is as you on this machine"
    )


class Pool(Section):
    """Sandboxes made ready ahead of the episodes that will need them."""

    size: int | None = Field(
        None, ge=0, description="ready sandboxes at most; 0 is off; unset is the concurrency, at most 8"
    )
    memory: ByteSize | None = Field(
        None, ge=1 << 20, description="memory limits of all ready sandboxes together, at most"
    )
    max_idle: float = Field(300, gt=0, description="seconds a ready sandbox may wait before it is given up")


class Serving(Section):
    """Where ``serve`` listens, and how long what it serves may take."""

    host: str = Field("127.0.0.1", description="address `serve` listens on; 0.0.0.0 lets other machines in")
    port: int = Field(0, ge=0, le=65535, description="port `serve` listens on; 0 is any free one")
    hosts: tuple[str, ...] = Field(
        (), description="host names it answers to on loopback beside localhost and addresses: a reverse proxy's"
    )
    admin_key_env: str | None = Field(
        None, description="environment variable that holds the admin key; unset: a random one, told once"
    )
    session_ttl: float = Field(30 * 86400, gt=0, description="seconds after which a session ends unless refreshed")
    idle_timeout: float = Field(
        3600, gt=0, description="seconds without a call or a reward after which an episode ends, unscored if unrewarded"
    )
    session_calls: int = Field(64, ge=1, description="model calls of one session at once; further ones wait their turn")
    refuse_busy: bool = Field(False, description="answer calls beyond session_calls with 429 instead")
    areal_routes: bool = Field(False, description="also answer AReaL's /rl/start_session, set_reward and end_session")


class Online(Section):
    """What ``serve`` trains on."""

    batch_size: int = Field(8, ge=1, description="rewarded episodes in one update")
    group_size: int = Field(
        1, ge=1, description="rewarded episodes of one group in one update; above 1, sessions name their group"
    )
    group_timeout: float = Field(
        7200,
        gt=0,
        description="seconds after its latest reward for which the rest of an incomplete group is waited for",
    )
    max_staleness: int | None = Field(
        16, ge=0, description="tokens sampled more updates ago than this are not trained on; none is no limit"
    )


class RunConfig(Section):
    benchmark: PluginChoice | None = Field(
        PluginChoice(name="shell-arithmetic"), description="what to run: NAME or NAME@VERSION; none with tasks"
    )
    tasks: tuple[Path, ...] = Field((), description="task directories, instead of a benchmark")
    split: str | None = Field(None, description="split to evaluate; the benchmark's heldout (or only) split if unset")
    limit: int | None = Field(None, ge=1, description="the first N tasks in a seeded order")
    samples: int = Field(1, ge=1, description="episodes a task, for pass@k")
    seed: int = Field(0, description="of task order and of sampling")
    concurrency: int = Field(16, ge=1, description="episodes at once")
    retries: int = Field(2, ge=0, description="further attempts at an episode that came out unscored")
    model: str | None = Field(None, description="folder, hub id, or a remote model's name with base_url")
    base_url: str | None = Field(None, description="an OpenAI-compatible address; selects the api engine")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds that address's key")
    secrets: tuple[str, ...] = Field(
        (), description="environment variables whose values are kept out of records, beside those named like secrets"
    )
    max_turns: int | None = Field(None, ge=1, description="overrides the benchmark's and the task's")
    agent_timeout: float | None = Field(None, gt=0, description="seconds; overrides the task's")
    sampling: Sampling = Sampling()
    harness: PluginChoice = Field(PluginChoice(name="shell"), description="the agent")
    sandbox: PluginChoice = Field(PluginChoice(name="local"), description="where it acts")
    engine: PluginChoice = Field(PluginChoice(name="torch"), description="what runs the model")
    renderer: PluginChoice = Field(PluginChoice(name="template"), description="how messages become tokens")
    backend: PluginChoice = Field(PluginChoice(name="torch"), description="what computes weight updates")
    trainer: PluginChoice = Field(PluginChoice(name="none"), description="the algorithm; none evaluates only")
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    snapshots: Snapshots = Snapshots()
    pool: Pool = Pool()
    serving: Serving = Serving()
    online: Online = Online()
    plugins: tuple[Path, ...] = Field((), description="local plugin files to load")
    runs_dir: Path = Field(Path("runs"), description="where run directories are made")
    name: str | None = Field(None, description="run name; made from benchmark, model and trainer if unset")

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is not an address such as http://127.0.0.1:8000/v1")
        if parts.username or parts.password:
            raise ValueError("a key in an address ends up in files; name the variable that holds it: api_key_env")
        return value.rstrip("/")

    @property
    def trains(self) -> bool:
        return self.trainer.name != "none"


#: Keys that change how a run is carried out or shown but not what it measures: left out of the digest that
#: decides whether an interrupted run is continued.
NOT_IN_DIGEST = frozenset({"concurrency", "runs_dir", "name", "retries", "snapshots", "pool", "secrets", "serving"})
