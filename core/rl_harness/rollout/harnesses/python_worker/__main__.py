"""Entry point of the worker process: ``python .../python_worker/__main__.py CONTROL_FD``.

Started by path, so the interpreter need not have rl-harness. The process forks once: the child runs the agent and
talks to the harness over the control socket, the parent stays behind as its supervisor.
"""

import importlib
import os
import socket
import sys
import types


def load_package() -> None:
    """Make this folder importable under a name of its own: the agent may well have a module called ``agent``."""
    folder = sys.path[0]
    # A script's own folder comes first on its path; the agent's working directory belongs there instead.
    sys.path[0] = os.getcwd()  # noqa: PTH109  pathlib would double the start-up time
    package = types.ModuleType("_rl_harness_worker")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package


def main() -> None:
    """Fork into agent and supervisor. The exit status is the agent's, 128+N if signal N ended it."""
    load_package()
    supervisor = importlib.import_module("_rl_harness_worker.supervisor")
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    supervisor.adopt_orphans()
    own = os.getpid()
    agent = os.fork()
    if agent == 0:
        os.setpgid(0, 0)
        supervisor.die_with_parent(own)
        # The supervisor's standard input is its lifeline: the agent must not be able to read it.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        importlib.import_module("_rl_harness_worker.agent").run(control)
        return
    control.close()
    status = supervisor.supervise(agent)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


if __name__ == "__main__":
    main()
