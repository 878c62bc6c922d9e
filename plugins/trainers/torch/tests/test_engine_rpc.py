"""The call protocol between the main process and a worker: values, errors, streams, cancellation, death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from rl_harness.errors import EngineError, Unavailable
from rl_harness.records import Message, ids
from rl_harness.records.arrays import IdArray
from rl_harness_torch.rpc import Worker

WORKER = """
    import os, time
    from collections.abc import Iterator
    from rl_harness.errors import Unavailable
    from rl_harness.records import Message
    from rl_harness.records.arrays import IdArray
    from rl_harness_torch.rpc import serve

    class Target:
        stopped_at = None
        def add(self, numbers: IdArray, other: int) -> IdArray:
            return numbers + numbers.dtype.type(other)
        def shout(self, message: Message) -> Message:
            return Message(role=message.role, content=message.content.upper())
        def count(self, n: int) -> Iterator[int]:
            for i in range(n):
                self.stopped_at = i
                yield i
                time.sleep(0.002)
        def stopped(self) -> int | None:
            return self.stopped_at
        def unavailable(self) -> None:
            raise Unavailable("no such model", remedy="pip install it")
        def bug(self) -> None:
            {}["nothing here"]
        def pid(self) -> int:
            return os.getpid()
        def leave(self, code: int) -> None:
            print("last words", flush=True)
            os._exit(code)
        def sleep(self) -> None:
            time.sleep(60)
        def _secret(self) -> int:
            return 1

    serve(Target())
"""


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    (tmp_path / "rpc_target.py").write_text(dedent(WORKER))
    worker = await Worker.start("rpc_target", name="test", env={"PYTHONPATH": str(tmp_path)})
    yield worker
    await worker.close()


async def test_arrays_and_records_cross_unchanged(worker: Worker) -> None:
    result = await worker.call("add", ids([1, 2, 3]), 5, returns=IdArray)
    assert result.dtype == np.int32
    assert result.tolist() == [6, 7, 8]
    shouted = await worker.call("shout", Message(role="user", content="hi"), returns=Message)
    assert shouted == Message(role="user", content="HI")


async def test_many_calls_at_once_get_their_own_answers(worker: Worker) -> None:
    results = await asyncio.gather(*(worker.call("add", ids([i]), 100, returns=IdArray) for i in range(50)))
    assert [int(r[0]) for r in results] == [100 + i for i in range(50)]


async def test_a_stream_arrives_item_by_item_and_ends(worker: Worker) -> None:
    assert [item async for item in worker.stream("count", 5, yields=int)] == [0, 1, 2, 3, 4]


async def test_closing_a_stream_stops_it_in_the_worker(worker: Worker) -> None:
    stream = worker.stream("count", 1_000_000, yields=int)
    assert await anext(stream) == 0
    await stream.aclose()  # type: ignore[attr-defined]  # an async generator
    stopped = await worker.call("stopped", returns=int)
    assert stopped < 1_000_000 - 1


async def test_an_error_arrives_as_its_own_class_with_its_remedy(worker: Worker) -> None:
    with pytest.raises(Unavailable, match="no such model") as caught:
        await worker.call("unavailable", returns=type(None))
    assert caught.value.remedy == "pip install it"


async def test_a_bug_arrives_as_the_failure_class_and_its_traceback_is_logged(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rl_harness.worker.test")
    with pytest.raises(EngineError, match=r"the test worker failed: KeyError: 'nothing here'"):
        await worker.call("bug", returns=type(None))
    await worker.close()
    assert "Traceback" in caplog.text
    assert "in bug" in caplog.text


async def test_private_and_unknown_methods_are_refused(worker: Worker) -> None:
    for method in ("_secret", "nope"):
        with pytest.raises(EngineError, match=method):
            await worker.call(method, returns=int)


async def test_arguments_of_the_wrong_shape_are_refused(worker: Worker) -> None:
    with pytest.raises(EngineError, match="ValidationError"):
        await worker.call("add", "text", 5, returns=IdArray)


async def test_a_killed_worker_fails_every_pending_call_and_later_ones(worker: Worker) -> None:
    pending = [asyncio.create_task(worker.call("sleep", returns=type(None))) for _ in range(3)]
    await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    for outcome in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(outcome, EngineError)
        assert "SIGKILL" in str(outcome)
    with pytest.raises(EngineError, match="SIGKILL"):
        await worker.call("pid", returns=int)
    assert not worker.alive


async def test_an_exit_names_the_code_and_the_last_line_of_output(worker: Worker) -> None:
    with pytest.raises(EngineError, match=r"exited with code 3: last words"):
        await worker.call("leave", 3, returns=type(None))


async def test_a_module_that_cannot_be_imported_fails_the_first_call() -> None:
    worker = await Worker.start("rl_harness_torch.no_such_module", name="broken")
    with pytest.raises(EngineError, match=r"broken worker .* exited with code 1: .*no_such_module"):
        await worker.call("start", returns=type(None))
    await worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_worker_dies_with_its_parent_even_in_the_middle_of_a_call(tmp_path: Path) -> None:
    (tmp_path / "rpc_target.py").write_text(dedent(WORKER))
    parent = dedent("""
        import asyncio, sys
        from rl_harness_torch.rpc import Worker
        async def main():
            worker = await Worker.start("rpc_target", name="test")
            print(await worker.call("pid", returns=int), flush=True)
            await worker.call("sleep", returns=type(None))
        asyncio.run(main())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        worker_pid = int(process.stdout.readline())
        process.kill()
        process.wait()
        # The worker holds the other end of the same pipe through its own parent's lifetime only if it survives.
        for _ in range(500):
            stat = Path(f"/proc/{worker_pid}/stat")
            if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                break
            signal.sigtimedwait([], 0.01)
        else:
            pytest.fail("the worker outlived its parent")
