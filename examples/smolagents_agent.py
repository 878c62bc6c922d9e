"""An agent of smolagents that acts in the sandbox; the environment points its model at the gateway.

rl-harness run TASK -o harness.path=examples --harness python:smolagents_agent --sandbox local --model MODEL
"""

import rl_harness
from smolagents import OpenAIModel, ToolCallingAgent, tool


@rl_harness.agent
def solve(task):
    @tool
    def shell(command: str) -> str:
        """Run a shell command and return what it prints.

        Args:
            command: the command.
        """
        return task.sandbox.exec(command).text

    agent = ToolCallingAgent(tools=[shell], model=OpenAIModel(task.model), max_steps=task.max_turns)
    return str(agent.run(task.instruction))
