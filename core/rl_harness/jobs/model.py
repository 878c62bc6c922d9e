"""The model of a job: its engine, renderer, replicas and, where it is trained, backend; created, checked, loaded."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, cast

import msgspec

from rl_harness.contracts import Backend, ChatEngine, ModelInfo, Renderer, TokenEngine, ToolSpec
from rl_harness.errors import Unavailable, Unsupported, UsageError
from rl_harness.gateway import ChatPolicy, TokenPolicy
from rl_harness.inference import Replicas
from rl_harness.plugins import Registry
from rl_harness.records import Message
from rl_harness.redaction import Secrets
from rl_harness.runs import Run
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.runs.info import MODEL_FOLDER

_SOME_TOOL: ToolSpec = {
    "type": "function",
    "function": {"name": "shell", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ModelParts:
    """What serves the model of a run and, if it trains, what trains it. Closed with ``stack``."""

    def __init__(self, config: RunConfig, registry: Registry, stack: contextlib.AsyncExitStack) -> None:
        self.config = config
        self.registry = registry
        self._stack = stack
        self.engine: TokenEngine | ChatEngine | None = None
        self.renderer: Renderer | None = None
        self.replicas: Replicas | None = None
        self.model: ModelInfo | None = None
        self.backend: Backend | None = None

    async def create(self) -> None:
        """Create and check engine, renderer and backend. Nothing costly is started yet."""
        config, registry = self.config, self.registry
        if config.model is None:
            raise UsageError("no model given", remedy="--model FOLDER|HUB_ID, or --model NAME --base-url URL")
        engine = _engine(config, registry)
        self.engine = engine
        if config.trains and not engine.capabilities.trainable:
            raise Unsupported(
                f"engine {_engine_name(config)!r} cannot be trained behind: it does not give token ids and log-probs, "
                "and its weights cannot be changed",
                remedy="give --model a folder or hub id and leave --base-url out, or use --trainer none",
            )
        if isinstance(engine, TokenEngine):
            self.renderer = cast(Renderer, create(registry, "renderers", config.renderer))
            await self.renderer.preflight()
        await engine.preflight()
        await engine.preflight_model(config.model)
        self._stack.push_async_callback(engine.close)
        if config.trains:
            self.backend = cast(Backend, create(registry, "backends", config.backend))
            transport(engine, self.backend)
            self._stack.push_async_callback(self.backend.close)
            await self.backend.preflight()

    async def load(self, *, calls_tools: bool) -> TokenPolicy | ChatPolicy:
        """Load the model: the policy that answers for it. A renderer that cannot render tools is refused now where the
        agent ``calls_tools``, and not in every episode."""
        engine = self.engine
        assert engine is not None
        assert self.config.model is not None
        self.model = await engine.start(self.config.model)
        name = self.model.name
        if isinstance(engine, ChatEngine):
            return ChatPolicy(name, engine)
        if self.model.path is None:
            raise Unavailable(f"engine {_engine_name(self.config)!r} gives no model folder to read a tokenizer from")
        assert self.renderer is not None
        self.renderer.load(self.model.path)
        _check_vocabulary(self.renderer, self.model)
        if calls_tools:
            self.renderer.render([Message(role="user")], [_SOME_TOOL])
        self.replicas = Replicas([engine])
        return TokenPolicy(name, self.replicas, self.renderer)

    def remember_model(self, run: Run) -> None:
        """Note where the model's tokenizer is, so that the run's token ids can be read as text later."""
        if self.model is not None and self.model.path is not None:
            run.store.set_state(MODEL_FOLDER, str(self.model.path.absolute()))


def create(registry: Registry, kind: str, choice: PluginChoice) -> Any:
    """The chosen plugin of a kind with its options."""
    return registry.create(kind, choice.name, choice.plugin_options)


def model_identity(model: str | None) -> dict[str, Any]:
    """What tells one model from another in the digest of a run: its name and, for a folder, its files."""
    identity: dict[str, Any] = {"model": model}
    if model and (folder := Path(model)).is_dir():
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir()) if f.is_file()]
        identity["files"] = hashlib.sha256(msgspec.json.encode(stats)).hexdigest()
    return identity


def known_secrets(config: RunConfig) -> Secrets:
    """What a gateway has to look for: the variables that the configuration says hold secrets are among it."""
    chosen = (config.engine, config.harness, config.sandbox, config.backend, config.renderer, config.trainer)
    options = (item for one in chosen for item in one.plugin_options.items())
    # A table of that name holds variables, not their names.
    named = {value for key, value in options if key.endswith("_env") and isinstance(value, str)}
    return Secrets.of_environment({*(config.api_key_env, *config.secrets, config.serving.admin_key_env or ""), *named})


def _check_vocabulary(renderer: Renderer, model: ModelInfo) -> None:
    """Refuse a tokenizer that was made for other weights: its ids would fail in every request."""
    highest = max(renderer.end_token_ids, default=-1)
    if model.vocab_size is not None and highest >= model.vocab_size:
        raise Unavailable(
            f"the tokenizer in {model.path} ends turns with {highest}, but the model has only {model.vocab_size} ids",
            remedy="give --model a folder whose tokenizer belongs to its weights",
        )


def _engine_name(config: RunConfig) -> str:
    return "api" if config.base_url else config.engine.name


def _engine(config: RunConfig, registry: Registry) -> TokenEngine | ChatEngine:
    options = config.engine.plugin_options
    if config.base_url:
        if not os.environ.get(config.api_key_env) and config.api_key_env != "OPENAI_API_KEY":
            raise UsageError(f"api_key_env names {config.api_key_env}, which is not set")
        further = options if config.engine.name == "api" else {}
        options = {"base_url": config.base_url, "api_key_env": config.api_key_env, **further}
    return cast(TokenEngine | ChatEngine, registry.create("engines", _engine_name(config), options))


def transport(engine: TokenEngine | ChatEngine, backend: Backend) -> str:
    """The first way of moving weights that both sides have. Raises ``Unsupported`` when there is none."""
    for transport in backend.capabilities.weight_transports:
        if transport in engine.capabilities.weight_transports:
            return transport
    raise Unsupported(
        f"the engine takes weights by {list(engine.capabilities.weight_transports)}, the backend gives them by "
        f"{list(backend.capabilities.weight_transports)}: they have no transport in common"
    )
