"""Policies: a named model as the gateway calls it. A policy answers one call with pieces of a reply as they become
certain, and records the turn; it knows nothing of HTTP or of any protocol."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from rl_harness.contracts.engine import ChatEngine, EngineCapabilities, GenerateRequest, TokenChunk
from rl_harness.contracts.renderer import Delta, Renderer, StreamParser
from rl_harness.errors import EngineError
from rl_harness.gateway.calls import Call, Finish, NamedTool, Piece, Token
from rl_harness.gateway.errors import ApiError, ContextTooLong, bad_request
from rl_harness.gateway.prompting import Prompt, build_prompt
from rl_harness.gateway.schemas import tools_problem
from rl_harness.gateway.sessions import Session
from rl_harness.gateway.tree import texts
from rl_harness.gateway.upstream import UpstreamReply, upstream_body
from rl_harness.records.arrays import IdArray, LogpArray, ids, logps
from rl_harness.records.seeds import derive_seed
from rl_harness.records.turn import Message, SamplingParams, Turn

_NOTHING = ids(())
#: Conversations of more characters are tokenised beside the event loop.
_LONG = 50_000
#: No token of any vocabulary in use stands for more characters: so much longer than the context is too long for sure.
_MOST_CHARACTERS = 256
#: Conversations with more new characters than this are counted piece by piece, up to the context's length, before they
#: are tokenised: that takes 100 to 250 bytes of memory a character.
_LARGE = 1 << 20
_PIECE = 1 << 18
#: The context of an engine that tells none.
_ENDLESS = 1 << 21
#: How far the count of a text in pieces may be off: by a part of it, and by some ids where it was cut.
_CUT_PART, _CUT_IDS = 1 / 32, 16

#: Sets of tools remembered as good.
_MOST_TOOLS = 1024


class TokenSource(Protocol):
    """A :class:`~rl_harness.contracts.TokenEngine` or :class:`~rl_harness.inference.Replicas`."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]: ...


class TokenPolicy:
    """A policy on our own engine: what is recorded are the very ids that were sampled."""

    protocol = "tokens"

    def __init__(self, name: str, engine: TokenSource, renderer: Renderer) -> None:
        self.name = name
        self._engine = engine
        self._renderer = renderer
        self._good_tools: dict[bytes, int] = {}

    async def answer(self, session: Session, call: Call) -> AsyncGenerator[Piece | Finish]:
        started = time.time()
        clock = time.perf_counter()
        tree = session.tree
        self._check_tools(call)
        opening = self._opening(call)
        capabilities = self._engine.capabilities
        if call.json_schema is not None and not capabilities.json_schema:
            raise bad_request(
                "structured output (response_format, text.format, output_config.format) is not supported by the engine "
                "of this model; leave it out",
                param="response_format",
            )
        room = capabilities.context_length
        prompt = await self._prompt(session, call, opening, room)
        sampling = self._sampling(session, call, prompt, room)
        request = GenerateRequest(
            id=f"{call.reply}-{call.choice}",
            prompt=prompt.ids,
            sampling=sampling,
            cache_key=session.cache_key,
            json_schema=call.json_schema,
        )
        tools = () if call.tool_choice == "none" else call.conversation.tools
        parser = self._renderer.parser(tools, sampling.stop)
        parser.feed(opening)
        completion = _Completion(len(opening), one_call=not call.parallel and bool(tools))
        known = len(prompt.ids)
        first_token: float | None = None
        piece: Piece | None = None
        stream = cast("AsyncGenerator[TokenChunk]", self._engine.generate(request))
        async with aclosing(stream):
            async for chunk in stream:
                if first_token is None and len(chunk.ids):
                    first_token = time.perf_counter() - clock
                piece = Piece(
                    deltas=completion.add(chunk, parser),
                    tokens=self._tokens(chunk) if call.logprobs else (),
                    prompt_tokens=known,
                    cached_tokens=completion.cached_tokens,
                )
                if completion.finish_reason is not None:
                    break
                yield piece
        if piece is None or completion.finish_reason is None:
            raise EngineError("the engine ended a completion without a finish reason")
        tail = parser.finish(completion.finish_reason)
        yield msgspec.structs.replace(piece, deltas=[*piece.deltas, *tail], final=True)
        message = parser.message()
        reason = completion.finish_reason
        if reason == "stop" and message.tool_calls:
            reason = "tool_calls"
        # From here to the end nothing awaits: the index is the place the turn really gets.
        turn = _recorded(
            id=f"{session.id}/{tree.next_index}",
            session=session.id,
            index=tree.next_index,
            policy=self.name,
            sampling=sampling,
            parent=prompt.parent,
            shared=prompt.shared,
            context=ids(prompt.ids[prompt.shared :]),
            completion=completion.ids,
            logps=completion.logps,
            versions=completion.versions,
            finish_reason=reason,
            message=message,
            prompt_tokens=len(prompt.ids),
            completion_tokens=completion.count,
            cached_tokens=completion.cached_tokens,
            started_at=started,
            seconds=time.perf_counter() - clock,
            first_token_seconds=first_token,
            extra=_extra(prompt, parser) | self._said(message, completion, parser, sampling),
        )
        tree.add(turn, prompt.conversation, prompt.follows, opening=len(opening), replies=prompt.replies)
        yield Finish(turn=turn)

    def _check_tools(self, call: Call) -> int:
        """Refuse tools whose schemas are none; how many characters they are. Agents send the same ones with every call:
        they are looked at once."""
        if not call.conversation.tools:
            return 0
        key = call.conversation.links[0]
        known = self._good_tools.get(key)
        if known is not None:
            return known
        found = tools_problem(call.conversation.tools)
        if found is not None:
            raise bad_request(found, param="tools")
        if len(self._good_tools) >= _MOST_TOOLS:
            self._good_tools.clear()
        size = self._good_tools[key] = len(_tools_text(call))
        return size

    async def count(self, session: Session, call: Call) -> int:
        room = self._engine.capabilities.context_length
        return len((await self._prompt(session, call, self._opening(call), room)).ids)

    async def _prompt(self, session: Session, call: Call, opening: IdArray, room: int | None) -> Prompt:
        size = call.conversation.size + self._check_tools(call)
        most = _ENDLESS if room is None else room
        if size > most * _MOST_CHARACTERS:
            raise ContextTooLong(most, size // _MOST_CHARACTERS, f"{size} characters")
        if size > _LARGE:
            least = await asyncio.to_thread(self._least, session, call, most)
            if least > most:
                raise ContextTooLong(most, least, f"more than {least} tokens")
        if size > _LONG:
            # Tokenising takes its time: others go on meanwhile.
            return await asyncio.to_thread(build_prompt, self._renderer, session.tree, call.conversation, opening)
        return build_prompt(self._renderer, session.tree, call.conversation, opening)

    def _least(self, session: Session, call: Call, room: int) -> int:
        """How many ids the conversation has at least, as far as it takes to know that they are more than ``room``."""
        found = session.tree.continued_by(call.conversation)
        messages = call.conversation.messages[found[1] if found else 0 :]  # those before are not tokenised again
        least = 0.0
        for text in itertools.chain(() if found else (_tools_text(call),), *map(texts, messages)):
            for start in range(0, len(text), _PIECE):
                count = self._renderer.count(text[start : start + _PIECE])
                if count is None:
                    return 0
                least += max(0.0, count * (1 - _CUT_PART) - _CUT_IDS)
                if least > room:
                    return int(least)
        return int(least)

    def _said(
        self, message: Message, completion: _Completion, parser: StreamParser, sampling: SamplingParams
    ) -> dict[str, Any]:
        """What clients are told of a completion beside its message: how many tokens its reasoning took (to the chunk),
        and which stop string ended it."""
        extra: dict[str, Any] = {}
        if message.reasoning is not None:
            extra["reasoning_tokens"] = completion.reasoning_tokens
        if parser.stopped_at is not None:
            text = self._renderer.decode(completion.ids)
            found = [(at, stop) for stop in sampling.stop if (at := text.find(stop)) >= 0]
            if found:
                extra["stop"] = min(found)[1]
        return extra

    def _opening(self, call: Call) -> IdArray:
        """What the reply has to begin with, so that it is a tool call."""
        if call.tool_choice in ("auto", "none"):
            return _NOTHING
        name = call.tool_choice.name if isinstance(call.tool_choice, NamedTool) else None
        opening = self._renderer.call_opening(name)
        if opening is None:
            raise bad_request(
                "tool_choice: this model cannot be made to call a tool; use 'auto' or 'none'", param="tool_choice"
            )
        return opening

    def _sampling(self, session: Session, call: Call, prompt: Prompt, room: int | None) -> SamplingParams:
        sampling = call.sampling
        limit = sampling.max_tokens
        if room is not None:
            left = room - len(prompt.ids)
            if left < 1:
                raise ContextTooLong(room, len(prompt.ids), f"{len(prompt.ids)} tokens")
            limit = left if limit is None else min(limit, left)
        seed = sampling.seed
        if seed is not None and session.sampling.seed is not None:
            # Every call draws its own noise, the same again for a call that failed before.
            seed = derive_seed(seed, prompt.ids.tobytes(), len(session.tree.answered(call.conversation)))
        if seed is not None and call.choice:
            seed = derive_seed(seed, b"choice", call.choice)
        return msgspec.structs.replace(
            sampling,
            max_tokens=limit,
            seed=seed,
            stop_token_ids=tuple(dict.fromkeys(sampling.stop_token_ids + self._renderer.end_token_ids)),
        )

    def _tokens(self, chunk: TokenChunk) -> Sequence[Token]:
        tops = chunk.top_logprobs or ({},) * len(chunk.ids)
        return [
            Token(
                text=self._spell(token),
                logp=float(logp),
                top=tuple((self._spell(other), float(value)) for other, value in top.items()),
            )
            for token, logp, top in zip(chunk.ids.tolist(), chunk.logps, tops, strict=True)
        ]

    def _spell(self, token: int) -> str:
        return self._renderer.decode(ids([token]))


class ChatPolicy:
    """A policy behind somebody's chat API: turns are recorded for reports, without ids."""

    protocol = "chat"

    def __init__(self, name: str, engine: ChatEngine) -> None:
        self.name = name
        self._engine = engine

    async def answer(self, session: Session, call: Call) -> AsyncGenerator[Piece | Finish]:
        started = time.time()
        clock = time.perf_counter()
        reply = UpstreamReply()
        first_token: float | None = None
        stream = cast("AsyncGenerator[Mapping[str, Any]]", self._engine.complete(upstream_body(call)))
        async with aclosing(stream):
            async for chunk in stream:
                deltas = reply.add(chunk)
                tokens = reply.take_tokens() if call.logprobs else ()
                if deltas or tokens:
                    first_token = time.perf_counter() - clock if first_token is None else first_token
                    yield Piece(deltas=deltas, tokens=tokens)
        tail = reply.finish()
        if tail:
            yield Piece(deltas=tail)
        tree = session.tree
        found = tree.continued_by(call.conversation)
        follows = None if found is None else found[0].said
        empty = np.zeros(0)
        turn = Turn(
            id=f"{session.id}/{tree.next_index}",
            session=session.id,
            index=tree.next_index,
            policy=self.name,
            sampling=call.sampling,
            parent=None if follows is None else follows.id,
            shared=0,
            context=ids(empty),
            completion=ids(empty),
            logps=logps(empty),
            versions=ids(empty),
            finish_reason=reply.finish_reason,
            message=reply.message(),
            prompt_tokens=reply.usage.prompt_tokens,
            completion_tokens=reply.usage.completion_tokens,
            exact=False,
            cached_tokens=reply.usage.cached_tokens,
            started_at=started,
            seconds=time.perf_counter() - clock,
            first_token_seconds=first_token,
            extra=reply.extra(),
        )
        tree.add(turn, call.conversation, follows)
        yield Finish(turn=turn)

    async def count(self, session: Session, call: Call) -> int:
        raise ApiError(
            404,
            "the tokens of a model behind a chat API cannot be counted: its tokenizer is not known",
            code="not_found",
        )


class _Completion:
    """The ids of a completion as they arrive, with everything recorded about each."""

    def __init__(self, opening: int, *, one_call: bool) -> None:
        self.finish_reason: str | None = None
        self._opening = opening  # ids the parser got before those of the completion
        self._one_call = one_call  # it ends with its first call
        self.cached_tokens = 0
        self.reasoning_tokens = 0  # before the first text or call; only of use where there is reasoning
        self._answering = False
        self._ids: list[IdArray] = []
        self._logps: list[LogpArray] = []
        self._versions: list[list[int]] = []  # and for how many ids in a row
        self.count = 0

    def add(self, chunk: TokenChunk, parser: StreamParser) -> list[Delta]:
        """Take a chunk, up to where a stop string ends the completion."""
        size = len(chunk.ids)
        if len(chunk.logps) != size:
            raise EngineError(f"the engine gave {len(chunk.logps)} log-probs for {size} tokens")
        self.finish_reason = chunk.finish_reason
        deltas, count = self._feed(chunk, parser)
        if parser.stopped_at is not None:
            count = max(parser.stopped_at - self._opening - self.count, 0)
            self.finish_reason = "stop"
        if count:
            self._ids.append(chunk.ids if count == size else chunk.ids[:count])
            self._logps.append(chunk.logps if count == size else chunk.logps[:count])
            if self._versions and self._versions[-1][0] == chunk.version:
                self._versions[-1][1] += count
            else:
                self._versions.append([chunk.version, count])
            self.count += count
        if not self._answering:
            self._answering = any(delta.text or delta.tool_call is not None for delta in deltas)
            if not self._answering:
                self.reasoning_tokens += count
        if chunk.cached_tokens > self.cached_tokens:
            self.cached_tokens = chunk.cached_tokens
        return deltas

    def _feed(self, chunk: TokenChunk, parser: StreamParser) -> tuple[list[Delta], int]:
        """What a chunk made certain, and how many of its ids belong to the completion."""
        if not self._one_call:
            return parser.feed(chunk.ids), len(chunk.ids)
        deltas: list[Delta] = []
        for count in range(1, len(chunk.ids) + 1):
            deltas += parser.feed(chunk.ids[count - 1 : count])
            if any(delta.tool_call is not None for delta in deltas):
                self.finish_reason = "stop"
                return deltas, count
        return deltas, len(chunk.ids)

    @property
    def ids(self) -> IdArray:
        return cast(IdArray, _joined(self._ids, np.int32))

    @property
    def logps(self) -> LogpArray:
        return cast(LogpArray, _joined(self._logps, np.float32))

    @property
    def versions(self) -> IdArray:
        runs = [np.full(count, version, dtype=np.int32) for version, count in self._versions]
        return cast(IdArray, _joined(runs, np.int32))


def _tools_text(call: Call) -> str:
    return msgspec.json.encode(call.conversation.tools).decode()


def _recorded(**fields: Any) -> Turn:
    """Raises ``EngineError`` where what the engine gave is no turn, as with a log-prob that is not finite."""
    try:
        return Turn(**fields)
    except ValueError as error:
        raise EngineError(f"the engine's completion cannot be recorded: {error}") from None


def _joined(arrays: list[Any], kind: type) -> Any:
    """The arrays as one that nobody can write to."""
    found = arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.zeros(0, dtype=kind)], dtype=kind)
    found.flags.writeable = False
    return found


def _extra(prompt: Prompt, parser: StreamParser) -> dict[str, Any]:
    """What is worth knowing of a turn beside its ids: which turn it follows where the ids do not tell, because the
    template rewrote that one; and what is wrong with its calls."""
    extra: dict[str, Any] = {}
    if prompt.follows is not None and prompt.parent != prompt.follows.id:
        extra["follows"] = prompt.follows.id
    if parser.problems:
        extra["tool_problems"] = list(parser.problems)
    return extra
