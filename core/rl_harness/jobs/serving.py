"""The gateway as the place where online sessions are served."""

from __future__ import annotations

from rl_harness.gateway import Gateway
from rl_harness.gateway.sessions import KeyDigests, Session
from rl_harness.gateway.tree import TurnTree
from rl_harness.records import SamplingParams


class GatewayHost:
    """Sessions that call ``policy``, sampled as ``sampling`` says."""

    def __init__(self, gateway: Gateway, policy: str, sampling: SamplingParams) -> None:
        self._gateway = gateway
        self._policy = policy
        self._sampling = sampling

    def open(self, id: str, *, key: bytes, secret: bytes, tree: TurnTree) -> Session:
        session = self._gateway.open_session(
            id, policy=self._policy, sampling=self._sampling, digests=KeyDigests(key, secret)
        )
        session.tree = tree
        return session

    async def close(self, id: str) -> None:
        await self._gateway.close_session(id)
