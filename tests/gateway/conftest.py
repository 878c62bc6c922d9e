"""A gateway with a scripted engine behind it, and an OpenAI client in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from rl_harness.contracts import GenerateRequest, Renderer, TokenChunk
from rl_harness.gateway import ChatPolicy, Gateway, Session, TokenPolicy
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.inference.api import ApiEngine, ApiOptions
from rl_harness.records import SamplingParams, Turn, prompt_of
from rl_harness.testing.engine import Reply, ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer


class GatedEngine(ScriptedEngine):
    """Waits after each chunk while ``gate`` is not set."""

    def __init__(self, options: ScriptedOptions) -> None:
        super().__init__(options)
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async with contextlib.aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                if chunk.finish_reason is None:
                    self.waiting = True
                    await self.gate.wait()


class Bench:
    """One policy ``m`` behind a running gateway, with a session open."""

    def __init__(self, engine: GatedEngine, renderer: Renderer, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.renderer = renderer
        self.gateway = gateway
        self.http = http
        self.session = self.open("s")

    @functools.cached_property
    def remote(self) -> Session:
        """Of a model behind a chat API, which nobody asks."""
        return self.gateway.open_session("remote", policy="remote")

    def open(self, name: str, **how: Any) -> Session:
        return self.gateway.open_session(name, policy="m", **({"sampling": SamplingParams()} | how))

    def client(self, session: Session | None = None, **how: Any) -> openai.AsyncOpenAI:
        key = (session or self.session).api_key
        return openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=key, max_retries=0, **how)

    def anthropic(self, session: Session | None = None) -> Any:
        from anthropic import AsyncAnthropic

        key = (session or self.session).api_key
        base_url = self.gateway.base_url.removesuffix("/v1")
        return AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0)

    def post(
        self,
        body: Any,
        *,
        path: str = "/chat/completions",
        session: Session | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """A raw request: ``body`` is sent as it is if it is bytes, else as JSON."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        key = {"authorization": f"Bearer {(session or self.session).api_key}"}
        url = f"{self.gateway.base_url}{path}"
        return self.http.post(url, headers=key | (headers or {}), **sent)

    async def ask(self, *messages: Any, session: Session | None = None, **fields: Any) -> dict[str, Any]:
        """The reply's message to some messages; strings are the user's."""
        body = {"model": "m", "messages": [as_message(m) for m in messages], **fields}
        async with self.post(body, session=session) as response:
            answer = await response.json()
            assert response.status == 200, answer
            message: dict[str, Any] = answer["choices"][0]["message"]
            return message

    def prompt(self, turn: Turn) -> str:
        turns = {one.id: one for one in self.session.turns}
        return self.renderer.decode(prompt_of(turn, turns.__getitem__))


def as_message(message: Any) -> dict[str, Any]:
    return {"role": "user", "content": message} if isinstance(message, str) else message


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def renderer(folder: Path) -> TemplateRenderer:
    made = TemplateRenderer(TemplateOptions())
    made.load(folder)
    return made


@pytest.fixture
async def bench(folder: Path, renderer: TemplateRenderer) -> AsyncIterator[Bench]:
    """Answers ``ok`` unless told otherwise with :func:`replies` or ``bench.engine.reply``."""
    engine = GatedEngine(ScriptedOptions(replies=("ok",)))
    await engine.start(str(folder))
    remote = ChatPolicy("remote", ApiEngine(ApiOptions()))
    async with (
        Gateway({"m": TokenPolicy("m", engine, renderer), "remote": remote}) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield Bench(engine, renderer, gateway, http)
        engine.gate.set()


@pytest.fixture
def replies(bench: Bench) -> Callable[..., None]:
    """``replies("a", "b")``: what the engine says next."""

    def script(*said: Reply) -> None:
        left = list(said)
        bench.engine.reply = lambda request, prompt: left.pop(0)

    return script
