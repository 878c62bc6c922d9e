"""A harness plugin in one file whose agent runs INSIDE the sandbox and calls the model from there, without any network.

    rl-harness run TASK -p examples/inside_harness.py --harness inside --sandbox local --model MODEL

``inside=True`` is all it takes: the endpoint it is given is then an address in the sandbox. The agent is a script of
its own, which knows nothing of rl-harness; any program that can be pointed at an OpenAI address will do.
"""

from __future__ import annotations

import shlex
from typing import ClassVar

from rl_harness.contracts import Harness, HarnessCapabilities, HarnessContext, HarnessResult
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.records import Termination

AGENT = """
import json, os, sys, urllib.request

body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}], "stream": True}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
text = ""
with urllib.request.urlopen(request) as response:
    for line in response:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
with open("answer.txt", "w") as file:
    file.write(text)
print(text)
"""


@hookimpl
def rl_harness_harnesses() -> list[Extension]:
    return [Extension("inside", f"{__name__}:InsideHarness", "a script in the sandbox that asks the model once")]


class InsideHarness(Harness):
    api: ClassVar[int] = 1

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(inside=True)

    async def run(self, context: HarnessContext) -> HarnessResult:
        assert context.sandbox is not None
        assert context.endpoint is not None
        environment = {
            "OPENAI_BASE_URL": context.endpoint.base_url,
            "OPENAI_API_KEY": context.endpoint.api_key,
            "OPENAI_MODEL": context.endpoint.model,
        }
        command = f"python3 -c {shlex.quote(AGENT)} {shlex.quote(context.task.instruction)}"
        done = await context.sandbox.exec(command, env=environment, timeout=context.seconds_left())
        if done.timed_out:
            return HarnessResult(termination=Termination.TIME_LIMIT)
        if not done.ok:
            return HarnessResult(termination=Termination.AGENT_ERROR, detail=done.stderr.decode("utf-8", "replace"))
        return HarnessResult(termination=Termination.ANSWER, answer=done.stdout.decode("utf-8", "replace"))
