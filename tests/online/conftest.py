"""Places to serve in; whatever was started there ends with the test, or with its module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.jobs.serving import GatewayHost
from rl_harness.online import ArealRoutes, OnlineSessions, RecordingPolicy, Routes, digest
from rl_harness.records import SamplingParams
from rl_harness.runs import RunStore
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.serving import ServingPlace
from rl_harness.testing.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ServingPlace]]:
    places: list[ServingPlace] = []

    def make() -> ServingPlace:
        places.append(ServingPlace(tmp_path_factory.mktemp("serve")))
        return places[-1]

    yield make
    for place in places:
        place.kill()


class Desk:
    """Gateway, sessions and routes in this process, on a scripted engine; ``closed`` are the episodes that are over."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 1000.0
        self.closed: list[Any] = []

    async def open(self) -> None:
        self.store = RunStore(self.directory / "db.sqlite")
        renderer = TemplateRenderer(TemplateOptions())
        renderer.load(write_tokenizer(self.directory / "tiny"))
        self.engine = ScriptedEngine(ScriptedOptions(replies=("yes", "no"), delay=0.02))
        await self.engine.start(str(self.directory / "tiny"))
        policy = RecordingPolicy(TokenPolicy("m", self.engine, renderer), self.record)
        self.gateway = Gateway({"m": policy})
        self.sessions = OnlineSessions(
            self.store,
            GatewayHost(self.gateway, "m", SamplingParams(max_tokens=16)),
            ttl=3600.0,
            idle_timeout=60.0,
            needs_group=False,
            closed=self.closed.append,
            clock=lambda: self.now,
        )
        self.sessions.load()
        routes = Routes(
            self.sessions, admin_digest=digest("admin"), base_url=lambda _: self.gateway.base_url, status=dict
        )
        ArealRoutes(self.sessions, routes).mount(self.gateway)
        await self.gateway.start()

    async def record(self, *turn: Any) -> None:
        await self.sessions.record(*turn)

    async def close(self) -> None:
        await self.gateway.close()
        self.store.close()

    async def ask(self, keys: Any, *messages: str) -> str:
        """The reply to a conversation, whose messages are the user's and the model's in turn."""
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        async with openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=keys.api, max_retries=0) as client:
            reply = await client.chat.completions.create(model="m", messages=said)
        return reply.choices[0].message.content or ""


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    await desk.open()
    yield desk
    await desk.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ServingPlace]:
    place = ServingPlace(tmp_path)
    yield place
    place.kill()
