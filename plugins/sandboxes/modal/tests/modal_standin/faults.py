"""Faults on demand: a rule names a remote procedure and how its next calls go wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch

from grpclib import GRPCError, Status
from modal_proto import api_pb2


@dataclasses.dataclass
class Rule:
    """``method`` is a pattern of names such as ``SandboxCreateV2``; ``times`` calls meet it.

    ``latency`` seconds pass first. ``status`` is then the call's answer, with ``retry_after`` attached as Modal does,
    in place of doing it; with ``answer_lost`` it is done all the same. ``cut_after`` ends a stream of output, without
    a status, after that many bytes. ``empty`` answers with an empty message in place of doing it.
    """

    method: str
    times: int = 1
    latency: float = 0.0
    status: str | None = None
    message: str = ""
    retry_after: float | None = None
    answer_lost: bool = False
    cut_after: int | None = None
    empty: bool = False

    def error(self) -> GRPCError | None:
        if self.status is None:
            return None
        details = None
        if self.retry_after is not None:
            details = [api_pb2.RPCRetryPolicy(retry_after_secs=self.retry_after)]
        return GRPCError(Status[self.status], self.message, details)


class Empty(Exception):
    """A call is answered with an empty message."""


class Faults:
    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.calls: dict[str, int] = {}

    def take(self, method: str, *, cuts: bool = False) -> Rule | None:
        """The rule that this call meets, counted off; ``cuts``: of those that cut a stream."""
        for rule in self.rules:
            if (rule.cut_after is not None) is cuts and fnmatch.fnmatchcase(method, rule.method):
                rule.times -= 1
                if rule.times <= 0:
                    self.rules.remove(rule)
                return rule
        return None

    async def before(self, method: str) -> GRPCError | None:
        """Raises what the call answers instead of being done; returns what it answers afterwards."""
        self.calls[method] = self.calls.get(method, 0) + 1
        rule = self.take(method)
        if rule is None:
            return None
        await asyncio.sleep(rule.latency)
        if rule.empty:
            raise Empty
        error = rule.error()
        if error is not None and not rule.answer_lost:
            raise error
        return error
