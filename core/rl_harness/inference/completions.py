"""The engine ``completions``: a server that takes and gives token ids at OpenAI's completions address, as vLLM does.

Ids in, ids out, with the log-prob of each under the distribution it was sampled from, so that turns are recorded
exactly and the gateway's own renderer decides every id of a prompt. The server's weights cannot be changed from here.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from rl_harness.contracts.common import Options
from rl_harness.contracts.engine import EngineCapabilities, GenerateRequest, ModelInfo, TokenChunk, TokenEngine
from rl_harness.errors import EngineError, RequestRefused, Unavailable, UnknownModel
from rl_harness.inference.wire import Client, Response, WireError
from rl_harness.records.arrays import ids, logps

#: The request is at fault, not the server.
_REFUSED = frozenset({400, 413, 422})
_ERROR_BYTES = 4000
_MODELS_BYTES = 1 << 20
_MAX_EVENT = 16 << 20
_TOKEN = "token_id:"
_MOST_LOGP = 1e-4  # one of rounding
_BETWEEN = re.compile(rb"\n\ndata: ")  # in half of what bytes.replace takes
_DATA = re.compile(rb"^data: ?(\{.*)$", re.MULTILINE)
#: What reading JSON raises that is not what it should be; the last where it is nested very deep.
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_FINISHED = {"stop": "stop", "length": "length", "abort": "interrupted"}


class CompletionsOptions(Options):
    base_url: str = Field("http://127.0.0.1:8000/v1", description="address of the server, up to and including /v1")
    served: str | None = Field(None, description="the server's name for the model; unset takes the only one it lists")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key; unset sends none")
    connect_timeout: float = Field(30.0, gt=0, description="seconds to reach the address")
    idle_timeout: float = Field(600.0, gt=0, description="seconds without a byte before a reply counts as dead")
    patience: float = Field(
        120.0,
        ge=0,
        description="seconds for which a request is tried again while the server fails, as one restarting does",
    )


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


# One object for each token: none is looked at by the garbage collector, and what nobody asked for is not read.


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float]


class _TopLogprobs(_Logprobs, gc=False):
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    token_ids: list[_Id] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _ChoiceWithTops(_Choice, gc=False):
    logprobs: _TopLogprobs | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _EventWithTops(_Event, gc=False):
    choices: list[_ChoiceWithTops] = []  # type: ignore[assignment]  # read only


_event = msgspec.json.Decoder(_Event)
_events = msgspec.json.Decoder(list[_Event])
_events_with_tops = msgspec.json.Decoder(list[_EventWithTops])
_models = msgspec.json.Decoder(_Models)


class CompletionsEngine(TokenEngine):
    """Can be evaluated token by token; not trained, as nothing here can give the server other weights."""

    api = 1
    Options = CompletionsOptions

    def __init__(self, options: CompletionsOptions) -> None:
        super().__init__(options)
        self._options = options
        self._client: Client | None = None
        self._name = ""
        self._room: int | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            trainable=False,
            context_length=self._room,
            top_logprobs=20,
            json_schema=True,
            patience=self._options.patience,
        )

    async def preflight(self) -> None:
        """Raises ``Unavailable`` when the server does not answer, or gives no ids, or other log-probs than those of the
        distribution it samples from."""
        client = self._connection()
        try:
            await self._look(client)
            await self._try(client)
        finally:
            client.close()

    async def preflight_model(self, model: str) -> None:
        _check_folder(Path(model))

    async def start(self, model: str) -> ModelInfo:
        self._client = self._connection()
        await self._look(self._client)
        return ModelInfo(name=Path(model).name, path=Path(model), context_length=self._room)

    def _connection(self) -> Client:
        options = self._options
        key = os.environ.get(options.api_key_env, "")
        try:
            return Client(
                options.base_url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                connect_timeout=options.connect_timeout,
                idle_timeout=options.idle_timeout,
            )
        except ValueError as error:
            raise Unavailable(f"engine.base_url: {error}") from None

    async def _look(self, client: Client) -> None:
        """Which model the server has, and how long its context is."""
        where = self._options.base_url
        try:
            async with await client.request("GET", "/models") as response:
                body = await response.read(_MODELS_BYTES)
        except WireError as error:
            raise Unavailable(
                f"{where} does not answer: {error}", remedy="check engine.base_url; it ends in /v1"
            ) from None
        if response.status in (401, 403):
            raise Unavailable(
                f"{where} refuses the key ({response.status})",
                remedy=f"set the environment variable {self._options.api_key_env}",
            )
        try:
            models = {model.id: model for model in _models.decode(body).data}
        except _NO_JSON:
            raise Unavailable(f"{where}/models answered {response.status} with no list of models") from None
        wanted = self._options.served
        if wanted is None and len(models) == 1:
            wanted = next(iter(models))
        if wanted not in models:
            listed = ", ".join(models) or "none"
            raise Unavailable(f"{where} serves {listed}", remedy="name one of them with -o engine.served=NAME")
        self._name = models[wanted].id
        self._room = models[wanted].max_model_len

    async def _try(self, client: Client) -> None:
        """Sample one token where only one can be: its log-prob is 0 under the distribution that was sampled."""
        body = {"model": self._name, "prompt": [0, 0], "max_tokens": 1, "logprobs": 1, "temperature": 1.0, "top_k": 1}
        data = msgspec.json.encode(body | {"return_token_ids": True, "return_tokens_as_token_ids": True})
        where = f"{self._options.base_url}/completions"
        try:
            async with await client.request("POST", "/completions", data) as response:
                answer = await response.read(_MODELS_BYTES)
            if response.status != 200:
                raise Unavailable(f"{where} answered {response.status}: {_message(answer)}")
            choice = _event.decode(answer).choices[0]
        except (WireError, *_NO_JSON, IndexError) as error:
            raise Unavailable(f"{where} does not answer as expected: {error}") from None
        if not choice.token_ids or choice.logprobs is None:
            raise Unavailable(
                f"{where} gives no token ids with log-probs",
                remedy="a server that knows return_token_ids, as vLLM does",
            )
        if choice.logprobs.token_logprobs[0] != 0.0:
            raise Unavailable(
                f"{where} gives log-probs of another distribution than the one it samples from",
                remedy="start vLLM with --logprobs-mode processed_logprobs",
            )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        if self._client is None:
            raise EngineError("the completions engine was not started")
        try:
            async with await self._client.request("POST", "/completions", self._body(request)) as response:
                if response.status != 200:
                    raise await self._failed(response)
                reply = _Reply(bool(request.sampling.top_logprobs))
                while data := await response.chunk():
                    chunk = reply.add(data)
                    if reply.over:
                        response.drop_rest()  # the caller stops reading here
                    if chunk is not None:
                        yield chunk
                if not reply.over:
                    raise EngineError(f"{self._options.base_url}: the reply ended without a finish reason")
        except WireError as error:
            raise EngineError(f"{self._options.base_url}: {error}") from error
        except _NO_JSON as error:
            raise EngineError(f"{self._options.base_url} sent something that is no completion: {error}") from error

    def _body(self, request: GenerateRequest) -> bytes:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._name,
            "prompt": request.prompt.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "logprobs": max(sampling.top_logprobs, 1),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.stop:
            body |= {"stop": sampling.stop, "include_stop_str_in_output": True}
        if sampling.stop_token_ids:
            body["stop_token_ids"] = sampling.stop_token_ids
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if request.json_schema is not None:
            schema = {"name": "reply", "schema": request.json_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return msgspec.json.encode(body)

    async def _failed(self, response: Response) -> Exception:
        text = _message(await response.read(_ERROR_BYTES))
        if response.status in _REFUSED:
            return RequestRefused(text, code=None, status=response.status)
        return EngineError(
            f"{self._options.base_url}/completions answered {response.status}: {text}", status=response.status
        )

    def version(self) -> int:
        return 0

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
            await asyncio.sleep(0)  # its connections are gone when this returns


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UnknownModel(
            f"{folder} is no folder",
            remedy="--model names the folder of the model that the server serves, for its tokenizer and template",
        )
    if not (folder / "tokenizer.json").is_file():
        raise Unavailable(f"{folder / 'tokenizer.json'} does not exist")


class _Reply:
    """Takes a stream's bytes. What arrives together becomes one chunk."""

    def __init__(self, tops: bool) -> None:
        self.over = False
        self._tops = tops
        self._decoder = _events_with_tops if tops else _events
        self._rest = b""

    def add(self, data: bytes) -> TokenChunk | None:
        """Raises ``EngineError`` for what is no completion; what the bytes made whole, if anything."""
        text = self._rest + data if self._rest else data
        whole = text.rfind(b"\n") + 1
        self._rest = text[whole:]
        if len(self._rest) > _MAX_EVENT:
            raise EngineError(f"the server sent an event of more than {_MAX_EVENT} bytes")
        bodies = _bodies(text[:whole])
        if not bodies:
            return None
        tokens: list[int] = []
        values: list[float] = []
        tops: list[Mapping[int, float]] = []
        finish: Any = None
        cached = 0
        for event in self._decoder.decode(b"[%b]" % bodies):
            if event.error is not None:
                raise EngineError(f"the server failed: {_error_text(event.error)}")
            if event.usage is not None and event.usage.prompt_tokens_details is not None:
                cached = event.usage.prompt_tokens_details.cached_tokens or 0
            for choice in event.choices:
                if self.over or choice.index:
                    raise EngineError("the server gave more than the one completion it was asked for")
                if choice.token_ids:
                    tokens += choice.token_ids
                    if choice.logprobs is not None:
                        values += choice.logprobs.token_logprobs
                    if self._tops:
                        tops += _top(choice)
                if choice.finish_reason is not None:
                    finish = _FINISHED.get(choice.finish_reason)
                    if finish is None:
                        raise EngineError(f"the server ended a completion with {choice.finish_reason!r}")
                    self.over = True
        if len(values) != len(tokens):
            raise EngineError(f"the server gave {len(values)} log-probs for {len(tokens)} tokens")
        if values and max(values) > _MOST_LOGP:
            raise EngineError(f"the server gave a log-prob of {max(values)}, which is no probability's")
        if not tokens and finish is None:
            return None
        return TokenChunk(
            ids=ids(tokens),
            logps=logps(values),
            version=0,
            finish_reason=finish,
            cached_tokens=cached,
            top_logprobs=tuple(tops),
        )


def _bodies(events: bytes) -> bytes:
    """The JSON of some events, with commas between: what came together is read in one go."""
    if events.startswith(b"data: {"):
        found = _BETWEEN.sub(b",", events[6:]).rstrip().removesuffix(b",[DONE]")
        if b"\n" not in found:
            return found
    return b",".join(_DATA.findall(events))  # there are comments, other fields or other ends of lines


def _top(choice: _Choice) -> list[Mapping[int, float]]:
    tops = choice.logprobs.top_logprobs if isinstance(choice.logprobs, _TopLogprobs) else None
    if tops is None:
        raise EngineError("the server gave no top log-probs")
    try:
        return [{int(token.removeprefix(_TOKEN)): value for token, value in (top or {}).items()} for top in tops]
    except ValueError:
        raise EngineError("the server's top log-probs do not name token ids") from None


def _message(body: bytes) -> str:
    """What an error's body says."""
    try:
        return _error_text(msgspec.json.decode(body))
    except _NO_JSON:
        return body.decode("utf-8", "replace") or "no reason given"


def _error_text(value: Any) -> str:
    """The message in an error, however it is wrapped."""
    while isinstance(value, dict) and ("error" in value or "message" in value):
        value = value.get("error") or value.get("message")
    return str(value)
