"""Task directories, the registry of benchmarks, and the verifier."""

from rl_harness.tasks.benchmarks import BenchmarkHandle, in_seeded_order, open_benchmark
from rl_harness.tasks.check import CheckReport, check_task
from rl_harness.tasks.load import load_task, task_directories, tasks_from_directories
from rl_harness.tasks.new import new_task
from rl_harness.tasks.support import UNISOLATED, unsupported
from rl_harness.tasks.task import Artifact, Task, VerifierSpec
from rl_harness.tasks.verifier import Verdict, verify

__all__ = [
    "UNISOLATED",
    "Artifact",
    "BenchmarkHandle",
    "CheckReport",
    "Task",
    "Verdict",
    "VerifierSpec",
    "check_task",
    "in_seeded_order",
    "load_task",
    "new_task",
    "open_benchmark",
    "task_directories",
    "tasks_from_directories",
    "unsupported",
    "verify",
]
