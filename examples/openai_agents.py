"""An agent of the OpenAI Agents SDK that acts in the sandbox; the environment points it at the gateway.

rl-harness run TASK -o harness.path=examples --harness python:openai_agents --sandbox local --model MODEL
"""

import rl_harness
from agents import Agent, Runner, function_tool


@rl_harness.agent
async def solve(task):
    @function_tool
    async def shell(command: str) -> str:
        """Run a shell command and return what it prints."""
        return (await task.sandbox.aexec(command)).text

    agent = Agent(name="solver", instructions="Solve the task with the shell.", model=task.model, tools=[shell])
    return (await Runner.run(agent, task.instruction, max_turns=task.max_turns)).final_output
