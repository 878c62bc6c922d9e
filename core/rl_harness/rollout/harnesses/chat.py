"""Harness ``chat``: one model call a task; the reply is the answer. It needs no sandbox and has no tools."""

from __future__ import annotations

from pydantic import Field

from rl_harness.contracts.common import API, Options
from rl_harness.contracts.harness import Harness, HarnessCapabilities, HarnessContext, HarnessResult
from rl_harness.records.episode import Termination
from rl_harness.rollout.harnesses.chat_client import LimitReached, open_client, opening_messages


class ChatOptions(Options):
    system: str | None = Field(None, description="system prompt for tasks whose benchmark gives none")


class ChatHarness(Harness):
    """Asks once. An empty reply is ``no_action``; one cut off by the token limit keeps its text."""

    api = API
    Options = ChatOptions

    def __init__(self, options: ChatOptions) -> None:
        self._options = options

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(needs_sandbox=False, acts=False)

    async def run(self, context: HarnessContext) -> HarnessResult:
        system = context.task.system if context.task.system is not None else self._options.system
        async with open_client(context) as client:
            try:
                reply = await client.complete(opening_messages(context, system))
            except LimitReached as limit:
                return HarnessResult(termination=limit.termination, detail=limit.detail)
        if reply.finish_reason == "length":
            return HarnessResult(
                termination=Termination.TOKEN_LIMIT, answer=reply.text, detail="the reply was cut at the token limit"
            )
        if not reply.text.strip():
            return HarnessResult(termination=Termination.NO_ACTION, detail="the reply was empty")
        return HarnessResult(termination=Termination.ANSWER, answer=reply.text)
