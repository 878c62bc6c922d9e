"""The benchmarks that ship with the core. Their files are in ``task_registry/``, beside the package when it is
installed and at the root of the repository when it runs from source.
"""

from rl_harness.tasks.registry.arithmetic import ShellArithmetic
from rl_harness.tasks.registry.basics import ShellBasics

__all__ = ["ShellArithmetic", "ShellBasics"]
