"""Who decides how a completion is sampled: the session, whose distribution must not change under training, or the
client, who knows what it needs."""

from __future__ import annotations

import msgspec

from rl_harness.records.turn import SamplingParams

#: What a session samples with unless told otherwise.
DEFAULT_SAMPLING = SamplingParams()

#: What the session decides unless told otherwise: whatever shapes the sampled distribution.
DISTRIBUTION = frozenset({"temperature", "top_p", "top_k", "min_p"})


class ClientSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for; None where it says nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0


def resolve(
    session: SamplingParams, client: ClientSampling, fixed: frozenset[str]
) -> tuple[SamplingParams, tuple[str, ...]]:
    """The parameters to sample with, and the names of those the client asked for in vain.

    Names in ``fixed`` are the session's; of the others the client's win. The smaller ``max_tokens`` holds, and
    stop strings add up. The client's seed counts only where the session has none.
    """
    chosen: dict[str, float | int] = {}
    refused: list[str] = []
    for name in ("temperature", "top_p", "top_k", "min_p"):
        asked = getattr(client, name)
        if asked is None or asked == getattr(session, name):
            continue
        if name in fixed:
            refused.append(name)
        else:
            chosen[name] = asked
    limits = [limit for limit in (session.max_tokens, client.max_tokens) if limit is not None]
    if client.max_tokens is not None and min(limits) < client.max_tokens:
        refused.append("max_tokens")
    if client.seed is not None and session.seed is not None:
        refused.append("seed")
    resolved = msgspec.structs.replace(
        session,
        **chosen,
        max_tokens=min(limits, default=None),
        stop=tuple(dict.fromkeys(session.stop + client.stop)),
        seed=client.seed if session.seed is None else session.seed,
        top_logprobs=max(session.top_logprobs, client.top_logprobs),
    )
    return resolved, tuple(refused)
