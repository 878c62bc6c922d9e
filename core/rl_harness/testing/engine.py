"""A scripted engine: no model, replays what it is told through a real tokenizer. A test double for authors of
harnesses and renderers, and the model of overhead benchmarks; nothing it says was sampled.

Use it on the command line through the local plugin file :data:`SCRIPTED_PLUGIN`, which registers it as ``scripted``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from tokenizers import Tokenizer

from rl_harness.contracts.backend import WeightSource
from rl_harness.contracts.common import Options
from rl_harness.contracts.engine import EngineCapabilities, GenerateRequest, ModelInfo, TokenChunk, TokenEngine
from rl_harness.errors import ConfigError, EngineError, Unavailable
from rl_harness.records.arrays import ids, logps

#: The plugin file to name with ``-p``.
SCRIPTED_PLUGIN = Path(__file__).with_name("scripted_plugin.py")

Reply = str | Sequence[int]
"""What to say: a text, which ends with the end token, or exact ids, which end however they end."""


class Rule(Options):
    """Say ``reply`` where ``match`` is found in the prompt's text."""

    match: str = Field(description="regular expression searched for in the decoded prompt, special tokens included")
    reply: str = Field(description="what to say there")


class ScriptedOptions(Options):
    replies: tuple[str | tuple[int, ...], ...] = Field((), description="said one after the other, then over again")
    rules: tuple[Rule, ...] = Field((), description="tried in order before replies")
    chunk: int = Field(4, ge=1, description="tokens a chunk")
    delay: float = Field(0.0, ge=0, description="seconds before each chunk")
    end_token: str = Field("<|im_end|>", description="what ends a reply given as text")
    context_length: int = Field(1 << 20, ge=1, description="prompt plus completion tokens it takes")


class ScriptedEngine(TokenEngine):
    """Replies by rule or in order. ``reply``, if set, decides instead: it is called with the request and the
    prompt's text. ``requests`` are those received so far, ``running`` how many are being answered."""

    api = 1
    Options = ScriptedOptions

    def __init__(self, options: ScriptedOptions) -> None:
        super().__init__(options)
        self._options = options
        try:
            self._rules = [(re.compile(rule.match), rule.reply) for rule in options.rules]
        except re.error as error:
            raise ConfigError(f"engine.rules: {error.pattern!r} is no regular expression: {error}") from error
        self._next = 0
        self._version = 0
        self._prepared: int | None = None
        self._tokenizer: Tokenizer | None = None
        self._end = 0
        self.reply: Callable[[GenerateRequest, str], Reply] | None = None
        self.requests: list[GenerateRequest] = []
        self.running = 0
        #: End the next completions with this finish reason after one chunk, or raise in them.
        self.faults: list[Literal["interrupted"] | EngineError] = []

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            trainable=True,
            weight_transports=("file",),
            context_length=self._options.context_length,
            top_logprobs=20,
        )

    async def start(self, model: str) -> ModelInfo:
        file = Path(model) / "tokenizer.json"
        if not file.is_file():
            raise Unavailable(f"{file} does not exist", remedy="the scripted engine needs a folder with a tokenizer")
        self._tokenizer = Tokenizer.from_file(str(file))
        end = self._tokenizer.token_to_id(self._options.end_token)
        if end is None:
            raise Unavailable(f"{file} has no token {self._options.end_token!r}", remedy="set engine.end_token")
        self._end = end
        return ModelInfo(
            name=Path(model).name,
            path=Path(model),
            vocab_size=self._tokenizer.get_vocab_size(),
            context_length=self._options.context_length,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        self.requests.append(request)
        self.running += 1
        try:
            tokens, finish_reason = self._plan(request)
            fault = self.faults.pop(0) if self.faults else None
            for start in range(0, max(len(tokens), 1), self._options.chunk):
                await asyncio.sleep(self._options.delay)
                part = tokens[start : start + self._options.chunk]
                last = start + self._options.chunk >= len(tokens)
                interrupted = fault == "interrupted"
                yield TokenChunk(
                    ids=ids(part),
                    # Any finite numbers do; these tell tokens apart, so that a shifted array shows.
                    logps=logps([-(token % 7 + 1) / 8 for token in part]),
                    version=self._version,
                    finish_reason="interrupted" if interrupted else finish_reason if last else None,
                    top_logprobs=tuple({token: -(token % 7 + 1) / 8} for token in part)
                    if request.sampling.top_logprobs
                    else (),
                )
                if interrupted:
                    return
                if isinstance(fault, EngineError):
                    raise fault
        finally:
            self.running -= 1

    def _plan(self, request: GenerateRequest) -> tuple[list[int], Literal["stop", "length"]]:
        """The reply's ids, cut where the sampling parameters end it."""
        assert self._tokenizer is not None, "generate before start"
        said = self._say(request, self._tokenizer)
        limit = request.sampling.max_tokens
        text = ""
        for count, token in enumerate(said, start=1):
            if token in request.sampling.stop_token_ids:
                return said[:count], "stop"
            if request.sampling.stop:
                text = self._tokenizer.decode(said[:count], skip_special_tokens=False)
                if any(stop in text for stop in request.sampling.stop):
                    return said[:count], "stop"
            if limit is not None and count >= limit:
                return said[:count], "length"
        return said, "stop"

    def _say(self, request: GenerateRequest, tokenizer: Tokenizer) -> list[int]:
        prompt = ""
        if self._rules or self.reply is not None:
            prompt = tokenizer.decode(request.prompt.tolist(), skip_special_tokens=False)
        reply: Reply | None = None if self.reply is None else self.reply(request, prompt)
        if reply is None:
            reply = next((said for pattern, said in self._rules if pattern.search(prompt)), None)
        if reply is None:
            if not self._options.replies:
                raise EngineError("the scripted engine has no reply to this prompt")
            reply = self._options.replies[self._next % len(self._options.replies)]
            self._next += 1
        if not isinstance(reply, str):
            return list(reply)
        return [*tokenizer.encode(reply, add_special_tokens=False).ids, self._end]

    def version(self) -> int:
        return self._version

    async def prepare(self, source: WeightSource) -> None:
        self._prepared = source.manifest.version

    async def commit(self, version: int) -> None:
        if self._prepared != version:
            raise EngineError(f"version {version} was not prepared")
        self._version, self._prepared = version, None

    async def close(self) -> None:
        self._tokenizer = None
