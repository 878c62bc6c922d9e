"""A LangGraph agent that acts in the sandbox, as anyone would write it; the environment gives its model the address.

rl-harness run TASK -o harness.path=examples --harness langchain:langchain_agent:agent --sandbox local --model MODEL
"""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from rl_harness_langchain import sandbox_tools

agent = create_agent(ChatOpenAI(model="any"), tools=sandbox_tools(), system_prompt="Solve the task with the tools.")
