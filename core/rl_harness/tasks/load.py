"""Finds task directories and loads the tasks in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rl_harness.errors import TaskError
from rl_harness.tasks.schema import read_task
from rl_harness.tasks.task import Task


def load_task(directory: Path) -> Task:
    """Read a task directory. Raises :class:`~rl_harness.errors.TaskError` naming the file, line, key and reason."""
    return read_task(Path(directory))


def tasks_from_directories(paths: Iterable[Path]) -> list[Task]:
    """Every task named by ``paths``: a task directory, or a folder of task directories (in order of name)."""
    tasks: dict[str, Task] = {}
    for path in map(Path, paths):
        for directory in task_directories(path):
            task = load_task(directory)
            if other := tasks.get(task.name):
                if other.directory == task.directory:
                    continue
                raise TaskError(
                    f"two tasks are named {task.name!r}: {other.directory} and {task.directory}",
                    remedy="a task is named by its directory; rename one of them",
                )
            tasks[task.name] = task
    return list(tasks.values())


def task_directories(path: Path) -> list[Path]:
    """``path`` itself if it is a task directory, else those directly in it."""
    if not path.is_dir():
        raise TaskError(f"{path}: there is no such directory", remedy="give a task directory or a folder of them")
    if (path / "task.toml").exists():
        return [path]
    found = sorted(file.parent for file in path.glob("*/task.toml"))
    if not found:
        raise TaskError(
            f"{path}: holds no task.toml, and no directory in it does",
            remedy="`rl-harness tasks new DIRECTORY` writes a working task",
        )
    return found
