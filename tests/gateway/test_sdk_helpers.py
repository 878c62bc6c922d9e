"""What the SDKs build on top of the protocols: blocking clients, parsed output, loops that run tools by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from pydantic import BaseModel
from rl_harness.gateway import Gateway, TokenPolicy

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'


class Answer(BaseModel):
    value: int


async def test_clients_that_block(bench: Any) -> None:
    bench.engine.reply = lambda request, prompt: "the answer"
    key, url = bench.session.api_key, bench.gateway.base_url

    def ask() -> list[str]:
        with openai.OpenAI(api_key=key, base_url=url, max_retries=0) as client:
            texts = [client.chat.completions.create(**ASK).choices[0].message.content or ""]
            chunks = client.chat.completions.create(**ASK, stream=True)
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
            texts.append(client.responses.create(model="m", input="q").output_text)
            with client.responses.stream(model="m", input="q") as events:
                texts.append("".join(event.delta for event in events if event.type == "response.output_text.delta"))
        with anthropic.Anthropic(api_key=key, base_url=url.removesuffix("/v1"), max_retries=0) as other:
            texts.append(other.messages.create(**ASK, max_tokens=99).content[0].text)
            with other.messages.stream(**ASK, max_tokens=99) as stream:
                texts.append("".join(stream.text_stream))
        return texts

    assert await asyncio.to_thread(ask) == ["the answer"] * 6
    assert len(bench.session.turns) == 6


async def test_a_model_is_found_by_its_name(bench: Any) -> None:
    async with bench.client() as client:
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
    async with bench.anthropic() as client:
        assert (await client.models.retrieve("m")).display_name == "m"
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("other")


async def test_output_that_an_engine_holds_to_a_schema(bench: Any, folder: Any) -> None:
    class Holding(type(bench.engine)):  # type: ignore[misc]
        @property
        def capabilities(self) -> Any:
            return msgspec.structs.replace(super().capabilities, json_schema=True)

    engine = Holding(bench.engine.Options(replies=('{"value": 4}',)))
    await engine.start(str(folder))
    async with Gateway({"m": TokenPolicy("m", engine, bench.renderer)}) as gateway:
        key = gateway.open_session("t", policy="m").api_key
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as client:
            chat = await client.chat.completions.parse(**ASK, response_format=Answer)
            assert chat.choices[0].message.parsed == Answer(value=4)
            responses = await client.responses.parse(model="m", input="q", text_format=Answer)
            assert responses.output_parsed == Answer(value=4)
        url = gateway.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
            messages = await client.messages.parse(**ASK, max_tokens=99, output_format=Answer)
            assert messages.parsed_output == Answer(value=4)
    for request in engine.requests:
        assert request.json_schema["properties"]["value"]["type"] == "integer"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_that_runs_tools_by_itself(bench: Any, replies: Callable[..., None], stream: bool) -> None:
    """It asks for a conversation stored at the server first, and sends the whole of it once that is refused."""
    replies(f"<think>hm</think>I ask.\n{CALL}", "Sunny.")
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(place: str) -> str:
        """What the sky does."""
        asked.append(place)
        return "sunny"

    async with bench.anthropic() as client:
        runner = client.beta.messages.tool_runner(**ASK, max_tokens=999, tools=[weather], stream=stream)
        if stream:
            last = None
            async for running in runner:
                last = await running.get_final_message()
        else:
            last = await runner.until_done()
    assert last is not None
    assert (asked, last.content[0].text) == (["Ulm"], "Sunny.")
    one, two = bench.session.turns
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)
