"""An agent that broke the programs of its machine, for providers that need them: whatever it did, it is graded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rl_harness.contracts.sandbox import SandboxProvider
from rl_harness.tasks import Verdict, load_task, verify

_TASK = """
schema_version = "1.1"
[verifier]
timeout_sec = 60
environment_mode = "separate"
"""
_MARKS_AND_HOLDS = r"""#!/usr/bin/python3 -IS
import os, sys, time
for word in sys.argv:
    if len(word) == 16:
        for stream in (1, 2):
            os.write(stream, f"\036{word} 0\036\036{word}:0\036".encode())
if os.fork() == 0:
    time.sleep(100000)
"""

#: Programs by what an agent did to them: an empty one is removed.
FAKES = {
    "gone": "",
    "says nothing": "#!/bin/bash\nexit 0\n",
    "fails": "#!/bin/bash\necho no >&2; exit 1\n",
    "never ends": "#!/bin/bash\nexec sleep 100000\n",
    "says what it should not": "#!/bin/bash\nprintf '\\xff%.0s' {1..2000}\n",
    "never stops": "#!/bin/bash\nexec cat /dev/zero\n",
    "marks the end and holds its output": _MARKS_AND_HOLDS,
}
#: Which program was broken, and how.
BROKEN = [
    *(("sh", how) for how in FAKES),
    *(("tar", how) for how in ("gone", "says nothing", "fails", "never ends", "says what it should not")),
    ("cat", "gone"),
]


async def graded_after_breaking(provider: SandboxProvider, program: str, how: str) -> tuple[Verdict, Verdict]:
    """The verdicts on an agent that did nothing else, and on one that had done the task before."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "task"
        (directory / "tests").mkdir(parents=True)
        (directory / "environment").mkdir()
        (directory / "task.toml").write_text(_TASK)
        (directory / "instruction.md").write_text("Write done into the file done.")
        (directory / "tests/test.sh").write_text(
            'mkdir -p /logs/verifier; [ "$(cat done)" = done ] && echo 1 > /logs/verifier/reward.txt '
            "|| echo 0 > /logs/verifier/reward.txt\n"
        )
        task = load_task(directory)
        verdicts = []
        for work in ("", "echo done > done;"):
            sandbox = await provider.create(task.sandbox_spec({}, isolated=True, agent_timeout=60, setup=()))
            try:
                await sandbox.write_file("/opt/fake", FAKES[how].encode(), mode=0o755)
                script = (
                    f"{work} for d in /usr/local/bin /usr/bin /bin; do [ -e $d/{program} ] || continue;"
                    f" rm -f $d/{program}; [ ! -s /opt/fake ] || cp /opt/fake $d/{program}; done; exit 0"
                )
                await sandbox.exec(["bash", "-c", script])
                verdicts.append(await verify(task, sandbox, provider, None, {}))
            finally:
                await sandbox.close()
        return verdicts[0], verdicts[1]
