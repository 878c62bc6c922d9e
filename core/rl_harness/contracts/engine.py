"""Engine plugins: inference.

Two kinds of engine exist. A :class:`TokenEngine` takes ids and gives ids with the log-probs of what it sampled,
and can be trained behind. A :class:`ChatEngine` is somebody's chat API: it can be evaluated, not trained.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from rl_harness.contracts.backend import WeightSource
from rl_harness.contracts.common import Plugin
from rl_harness.errors import Unsupported
from rl_harness.records.arrays import IdArray, LogpArray
from rl_harness.records.turn import SamplingParams


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """``weight_transports``: those it can receive (``file``, …); empty means its weights cannot change.

    ``context_length``: prompt plus completion ids it can hold. ``json_schema``: it can hold a completion to a JSON
    schema. ``patience``: seconds for which a request that failed is tried again, for an engine
    that is another process and may come back.
    """

    trainable: bool
    weight_transports: tuple[str, ...] = ()
    context_length: int | None = None
    top_logprobs: int = 0
    json_schema: bool = False
    patience: float = 0.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One completion to sample. ``cache_key`` hints which requests share a prefix (session or group id).

    ``json_schema``: the completion's text has to be JSON of that schema; asked only of engines that can. ``begun``: how
    many of the prompt's last ids are this completion's own beginning, sampled before it was interrupted.
    """

    id: str
    prompt: IdArray
    sampling: SamplingParams
    cache_key: str | None = None
    json_schema: Mapping[str, Any] | None = None
    begun: int = 0


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some completion ids. ``logps`` are of the sampled distribution; all ids were sampled by ``version``.

    The last chunk has ``finish_reason``: ``stop`` (an end token or stop string, whose ids are included),
    ``length``, or ``interrupted`` (the caller resumes from the ids it has). ``cached_tokens`` is how much of
    the prompt was not computed anew.
    """

    ids: IdArray
    logps: LogpArray
    version: int
    finish_reason: Literal["stop", "length", "interrupted"] | None = None
    cached_tokens: int = 0
    top_logprobs: tuple[Mapping[int, float], ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine serves. ``path`` is a Hugging Face model folder (tokenizer and chat template included);
    ``vocab_size`` the number of ids that the model's weights know."""

    name: str
    path: Path | None = None
    vocab_size: int | None = None
    context_length: int | None = None


class Engine(Plugin):
    """What both kinds of engine have in common."""

    async def preflight_model(self, model: str) -> None:
        """Find out cheaply, without loading it, what is wrong with ``model``: called before a run is made.

        Raises ``UnknownModel`` where there is none of that name, and ``Unavailable`` with the file that is missing.
        """


class TokenEngine(Engine):
    """Token-in, token-out inference with live weight updates.

    The constructor gets options; :meth:`start` loads the model and returns what it serves.
    """

    protocol: ClassVar[str] = "tokens"

    @property
    @abc.abstractmethod
    def capabilities(self) -> EngineCapabilities: ...

    @abc.abstractmethod
    async def start(self, model: str) -> ModelInfo:
        """``model`` is a folder or a hub id. Raises ``Unavailable`` with the reason and the remedy."""

    @abc.abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream one completion. Closing the iterator cancels it in the engine.

        Raises ``EngineError`` when the engine failed, and ``UsageError`` for a request that can never be served: an
        empty prompt, one that fills the context, ids outside the vocabulary, sampling parameters out of range.
        """

    @abc.abstractmethod
    def version(self) -> int:
        """The policy version that serves new tokens now."""

    async def prepare(self, source: WeightSource) -> None:
        """Receive weights beside the serving ones; nothing changes for running requests."""
        raise Unsupported(f"{type(self).__name__} cannot take new weights")

    async def commit(self, version: int) -> None:
        """Switch to the prepared weights between two tokens, and drop every cached prefix."""
        raise Unsupported(f"{type(self).__name__} cannot take new weights")

    async def stats(self) -> Mapping[str, float]:
        return {}

    @abc.abstractmethod
    async def close(self) -> None: ...


class ChatEngine(Engine):
    """A model behind somebody's OpenAI-compatible chat API."""

    protocol: ClassVar[str] = "chat"
    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(trainable=False)

    @abc.abstractmethod
    async def start(self, model: str) -> ModelInfo: ...

    @abc.abstractmethod
    def complete(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Forward a chat-completions body (``stream`` set) and yield the upstream's chunk objects."""

    @abc.abstractmethod
    async def close(self) -> None: ...
