from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import textwrap
from email.message import Message as Headers
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest
import rl_harness
from pydantic import ValidationError
from rl_harness.errors import EngineError, HarnessError, SandboxError, Unavailable, UsageError
from rl_harness.records.episode import Termination
from rl_harness.records.turn import Message
from rl_harness.rollout.harnesses.python import PythonHarness, PythonOptions, worker_environment
from rl_harness.rollout.harnesses.python_worker.failures import gateway_failure
from rl_harness.testing.chat_server import ScriptedChat, ScriptedReply

#: The interpreter behind the virtual environment, which has none of its packages.
BARE_PYTHON = str(Path(sys.executable).resolve())


@pytest.fixture
def agent(tmp_path: Path):
    """Write ``agent.py`` and give the harness that runs its ``solve``."""
    folder = tmp_path / "project"
    folder.mkdir()

    def write(code: str, target: str = "agent:solve", **options) -> PythonHarness:
        (folder / "agent.py").write_text(textwrap.dedent(code))
        return PythonHarness(PythonOptions(target=target, path=folder, **options))

    return write


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed orphan stays a zombie until the machine's first process collects it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_the_return_value_is_the_answer(agent, make_context):
    harness = agent("def solve(task):\n    return task.instruction.upper()")
    result = await harness.run(make_context(instruction="shout"))
    assert (result.termination, result.answer) == (Termination.ANSWER, "SHOUT")


async def test_no_answer_is_an_answer_of_none(agent, make_context):
    result = await agent("def solve(task): pass").run(make_context())
    assert (result.termination, result.answer) == (Termination.ANSWER, None)


async def test_the_task_as_the_agent_sees_it(agent, make_context):
    harness = agent(
        """
        import json
        def solve(task):
            fields = vars(task) | {"sandbox": task.sandbox is not None}
            return json.dumps(fields)
        """
    )
    async with ScriptedChat() as chat:
        example = Message(role="user", content="hi")
        context = make_context(
            chat.endpoint, name="t", instruction="go", workdir="/w", system="S", examples=(example,), max_turns=7
        )
        result = await harness.run(context)
    assert json.loads(result.answer) == {
        "name": "t",
        "instruction": "go",
        "workdir": "/w",
        "system": "S",
        "examples": [{"role": "user", "content": "hi"}],
        "max_turns": 7,
        "time_limit": 30.0,
        "model": "scripted",
        "base_url": chat.endpoint.base_url,
        "api_key": chat.endpoint.api_key,
        "sandbox": False,
    }


class TestSandbox:
    async def test_acts_on_it(self, agent, make_context, sandbox, events):
        harness = agent(
            """
            def solve(task):
                task.sandbox.write_file("/app/in.bin", b"\\xff\\x00")
                assert task.sandbox.read_file("/app/in.bin") == b"\\xff\\x00"
                failed = task.sandbox.exec("echo out; echo err >&2; exit 3")
                assert (failed.exit_code, failed.stdout, failed.stderr, failed.ok) == (3, b"out\\n", b"err\\n", False)
                assert task.sandbox.exec(["printf", "%s", "$HOME"]).text == "$HOME"
                assert task.sandbox.exec("sleep 60", timeout=0.1).timed_out
                assert task.sandbox.exec("yes | head -c 100000", output_limit=10).stdout_truncated
                try:
                    task.sandbox.read_file("/app/absent")
                except FileNotFoundError:
                    return "fine"
            """
        )
        result = await harness.run(make_context(sandbox=sandbox))
        assert (result.termination, result.answer) == (Termination.ANSWER, "fine"), result.detail
        assert [data["exit_code"] for kind, data in events if kind == "exec"][:1] == [3]

    async def test_an_async_agent_runs_commands_side_by_side(self, agent, make_context, sandbox):
        harness = agent(
            """
            import asyncio
            async def solve(task):
                wait = task.sandbox.aexec("until test -e go; do sleep 0.01; done; echo gone", timeout=20)
                make = task.sandbox.awrite_file("/app/go", "x")
                done, _ = await asyncio.gather(wait, make)
                return done.text + (await task.sandbox.aread_file("/app/go")).decode()
            """
        )
        result = await harness.run(make_context(sandbox=sandbox))
        assert result.answer == "gone\nx", result.detail

    async def test_a_dead_sandbox_cannot_be_hidden_by_the_agent(self, agent, make_context, sandbox, monkeypatch):
        async def dead(*args, **kwargs):
            raise SandboxError("the sandbox is gone")

        monkeypatch.setattr(sandbox, "exec", dead)
        harness = agent(
            """
            def solve(task):
                try:
                    task.sandbox.exec("true")
                except BaseException:
                    return "all is well"
            """
        )
        with pytest.raises(SandboxError, match="gone"):
            await harness.run(make_context(sandbox=sandbox))

    async def test_a_file_the_sandbox_refuses_is_the_agents_affair(self, agent, make_context, sandbox, monkeypatch):
        async def refuse(*args, **kwargs):
            raise SandboxError("not a regular file")

        monkeypatch.setattr(sandbox, "read_file", refuse)
        harness = agent(
            """
            def solve(task):
                try:
                    task.sandbox.read_file("/dev/zero")
                except OSError as error:
                    return str(error)
            """
        )
        assert (await harness.run(make_context(sandbox=sandbox))).answer == "not a regular file"


@pytest.mark.needs("openai")
class TestModel:
    async def test_an_openai_client_needs_no_change(self, agent, make_context):
        harness = agent(
            """
            import os
            from openai import OpenAI
            def solve(task):
                messages = [{"role": "user", "content": task.instruction}]
                reply = OpenAI().chat.completions.create(model=os.environ["RL_HARNESS_MODEL"], messages=messages)
                return reply.choices[0].message.content
            """
        )
        async with ScriptedChat(["four"]) as chat:
            result = await harness.run(make_context(chat.endpoint, instruction="2+2?"))
        assert (result.termination, result.answer) == (Termination.ANSWER, "four")
        assert chat.requests[0]["messages"] == [{"role": "user", "content": "2+2?"}]

    ASK = """
        from openai import OpenAI
        def solve(task):
            try:
                client = OpenAI(max_retries=0)
                client.chat.completions.create(model=task.model, messages=[{"role": "user", "content": "hi"}])
            except Exception as error:
                raise RuntimeError("my framework failed") from error
        """

    async def test_a_limit_the_agent_let_through_is_that_limit(self, agent, make_context):
        async with ScriptedChat([ScriptedReply(status=400, error="context_length_exceeded")]) as chat:
            result = await agent(self.ASK).run(make_context(chat.endpoint))
        assert result.termination == Termination.TOKEN_LIMIT
        assert result.detail == "RuntimeError: my framework failed (agent.py, line 8, in solve)"

    async def test_a_failure_of_the_engine_is_not_the_agents(self, agent, make_context):
        async with ScriptedChat([ScriptedReply(status=500, error="server_error")]) as chat:
            with pytest.raises(EngineError):
                await agent(self.ASK).run(make_context(chat.endpoint))


class Answered(Exception):
    """An error of some HTTP client, with what clients hang on theirs."""

    def __init__(self, text: str = "", **attributes: object) -> None:
        super().__init__(text)
        vars(self).update(attributes)


class ReadTimeout(Answered):
    pass


GATEWAY = "http://127.0.0.1:1/v1"
OURS = SimpleNamespace(url=f"{GATEWAY}/chat/completions")
LIMIT = '{"error": {"message": "no more", "code": "turn_limit"}}'


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Answered(code="turn_limit"), "turn_limit"),
        (Answered(request=OURS, response=SimpleNamespace(status_code=400, text=LIMIT)), "turn_limit"),
        (HTTPError(OURS.url, 400, "Bad Request", Headers(), io.BytesIO(LIMIT.encode())), "turn_limit"),
        (
            Answered("litellm: Error code: 400 - {'error': {'code': 'context_length_exceeded'}}"),
            "context_length_exceeded",
        ),
        (Answered(request=OURS, response=SimpleNamespace(status_code=502, text="")), "engine"),
        (HTTPError(OURS.url, 500, "Oops", Headers(), io.BytesIO(b"")), "engine"),
        (Answered("connection refused", request=OURS), "engine"),
        (ReadTimeout(request=OURS), None),
        (Answered(request=OURS, response=SimpleNamespace(status_code=404, text="")), None),
        (Answered(request=SimpleNamespace(url="http://other/v1"), response=SimpleNamespace(status_code=500)), None),
        (ValueError("turn_limit"), None),
    ],
)
def test_a_failed_model_call_is_recognised_by_its_shape(error, cause):
    assert gateway_failure(error, GATEWAY) == cause


class TestEnds:
    @pytest.mark.parametrize(
        ("body", "detail"),
        [
            ("raise ValueError('bad\\nnews')", "ValueError: bad\nnews (agent.py, line 3, in solve)"),
            ("import json; json.loads('{')", "property name enclosed in double quotes"),
            ("sys.exit('enough')", "the agent called sys.exit('enough')"),
            ("sys.exit(0)", "the agent called sys.exit(0)"),
            ("os._exit(7)", "the agent's process exited with status 7"),
            ("os.kill(os.getpid(), 9)", "the agent's process was killed by signal 9 (SIGKILL)"),
            ("os.kill(os.getpid(), 11)", "the agent's process was killed by signal 11 (SIGSEGV)"),
            ("return 42", "the agent returned int"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt"),
            ("task.sandbox.exec('true')", "AttributeError: 'NoneType' object has no attribute 'exec'"),
        ],
    )
    async def test_an_agent_that_fails_is_an_agent_error(self, agent, make_context, body, detail):
        result = await agent(f"import os, sys\ndef solve(task):\n    {body}").run(make_context())
        assert result.termination == Termination.AGENT_ERROR
        assert detail in result.detail

    async def test_the_traceback_is_kept_as_an_event(self, agent, make_context, events):
        await agent("def solve(task):\n    inner()\ndef inner():\n    1 / 0").run(make_context())
        text = dict(events)["agent_traceback"]["text"]
        assert "in inner" in text
        assert text.rstrip().endswith("ZeroDivisionError: division by zero")

    async def test_what_it_prints_is_kept_apart_and_bounded(self, agent, make_context, events):
        harness = agent(
            """
            import os, sys
            def solve(task):
                print("START")
                sys.stderr.write("x" * 1_000_000)
                os.write(1, b"\\xff END")
                return "ok"
            """,
            output_limit=1000,
        )
        result = await harness.run(make_context())
        output = dict(events)["agent_output"]
        assert result.answer == "ok"
        assert output["text"].startswith("START\nxxx")
        assert output["text"].endswith("\ufffd END")
        assert output["truncated"]
        assert len(output["text"]) < 1100

    async def test_the_channel_is_bounded(self, agent, make_context, sandbox):
        harness = agent(
            """
            def solve(task):
                try:
                    task.sandbox.write_file("/app/big", b"x" * 40_000_000)
                except ValueError as error:
                    return str(error)
            """
        )
        assert "over the limit" in (await harness.run(make_context(sandbox=sandbox))).answer

    async def test_nonsense_on_the_channel_is_an_agent_error(self, agent, make_context):
        harness = agent(
            """
            import gc, socket, struct
            def solve(task):
                for found in gc.get_objects():
                    if isinstance(found, socket.socket):
                        found.sendall(struct.pack(">I", 5) + b"hello")
                import time; time.sleep(60)
            """
        )
        result = await harness.run(make_context())
        assert result.termination == Termination.AGENT_ERROR
        assert "channel" in result.detail

    async def test_threads_that_outlive_the_answer_are_ended(self, agent, make_context, monkeypatch):
        monkeypatch.setattr("rl_harness.rollout.harnesses.python._EXIT_GRACE", 0.2)
        harness = agent(
            """
            import os, threading, time
            def solve(task):
                threading.Thread(target=time.sleep, args=(60,)).start()
                return str(os.getpid())
            """
        )
        result = await harness.run(make_context())
        assert result.termination == Termination.ANSWER
        assert not alive(int(result.answer))


FAMILY = """
    import os, subprocess, sys, time
    def solve(task):
        child = subprocess.Popen(["sleep", "600"])
        daemon = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; exec sleep 600"], start_new_session=True,
                                  stdout=subprocess.PIPE)
        orphan = int(daemon.stdout.readline())
        task.sandbox.write_file("/app/pids", f"{os.getpid()} {os.getppid()} {child.pid} {daemon.pid} {orphan}")
        END
    """


async def pids_in(sandbox) -> list[int]:
    while True:
        try:
            return [int(pid) for pid in (await sandbox.read_file("/app/pids")).split()]
        except FileNotFoundError:
            await asyncio.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that leaves the group can be missed")
class TestNothingIsLeft:
    async def test_after_the_deadline(self, agent, make_context, sandbox):
        harness = agent(FAMILY.replace("END", "time.sleep(600)"))
        context = make_context(sandbox=sandbox)
        running = asyncio.create_task(harness.run(context))
        family = await pids_in(sandbox)
        assert all(alive(pid) for pid in family)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not any(alive(pid) for pid in family)

    async def test_the_deadline_is_the_time_limit(self, agent, make_context):
        result = await agent("import time\ndef solve(task): time.sleep(600)").run(make_context(seconds=0.3))
        assert result.termination == Termination.TIME_LIMIT

    @pytest.mark.parametrize("end", ["return 'done'", "os._exit(1)", "os.kill(os.getpid(), 9)"])
    async def test_after_the_agents_own_end(self, agent, make_context, sandbox, end):
        await agent(FAMILY.replace("END", end)).run(make_context(sandbox=sandbox))
        assert not any(alive(pid) for pid in await pids_in(sandbox))

    async def test_after_the_run_is_killed(self, agent, tmp_path):
        agent("import os, time\ndef solve(task):\n    print(os.getpid(), os.getppid(), flush=True); time.sleep(600)")
        script = f"""
            import asyncio, os, sys, time
            from pathlib import Path
            from rl_harness.contracts import AgentTask, HarnessContext
            from rl_harness.rollout.harnesses.python import PythonHarness, PythonOptions
            from rl_harness.rollout.harnesses.python_process import Output
            feed = Output.feed
            def show(self, data):
                sys.stdout.write(data.decode()); sys.stdout.flush()
                feed(self, data)
            Output.feed = show
            context = HarnessContext(task=AgentTask(name="t", instruction=""), sandbox=None, endpoint=None,
                                     deadline=time.monotonic() + 60)
            options = PythonOptions(target="agent:solve", path=Path({str(tmp_path / "project")!r}))
            asyncio.run(PythonHarness(options).run(context))
            """
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(script), stdout=asyncio.subprocess.PIPE
        )
        pids = [int(pid) for pid in (await run.stdout.readline()).split()]
        run.kill()
        await run.wait()
        for _ in range(500):
            if not any(alive(pid) for pid in pids):
                return
            await asyncio.sleep(0.01)
        pytest.fail("the worker outlived its run")


class TestEnvironment:
    def test_only_what_is_allowed_is_passed_on(self):
        ours = {
            "PATH": "/bin",
            "LC_ALL": "C",
            "OPENAI_API_KEY": "sk-real",
            "HF_TOKEN": "t",
            "HTTP_PROXY": "p",
            "A": "1",
        }
        assert worker_environment(ours, ("A", "B=2=3"), None) == {
            "PATH": "/bin",
            "LC_ALL": "C",
            "A": "1",
            "B": "2=3",
            "PYTHONUNBUFFERED": "1",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }

    async def test_the_worker_has_nothing_else(self, agent, make_context, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
        monkeypatch.setenv("MY_SECRET", "hidden")
        harness = agent("import os\ndef solve(task): return repr(sorted(os.environ.items()))")
        async with ScriptedChat() as chat:
            result = await harness.run(make_context(chat.endpoint))
        assert "sk-real" not in result.answer
        assert "hidden" not in result.answer
        assert f"('OPENAI_API_KEY', '{chat.endpoint.api_key}')" in result.answer
        assert f"('OPENAI_BASE_URL', '{chat.endpoint.base_url}')" in result.answer

    async def test_runs_under_an_interpreter_without_rl_harness(self, agent, make_context):
        harness = agent(
            """
            import importlib.util
            def solve(task):
                return str(importlib.util.find_spec("rl_harness"))
            """,
            python=BARE_PYTHON,
        )
        assert (await harness.run(make_context())).answer == "None"

    async def test_the_agents_modules_do_not_meet_ours(self, agent, make_context):
        harness = agent("import sys\ndef solve(task): return sys.modules['agent'].__file__")
        assert (await harness.run(make_context())).answer.endswith("project/agent.py")


class TestPreflight:
    async def test_a_target_that_can_be_called_passes(self, agent):
        await agent("def solve(task): raise SystemExit").preflight()
        await agent("class Agent:\n    @staticmethod\n    def act(task): ...", "agent:Agent.act").preflight()

    @pytest.mark.parametrize(
        ("code", "target", "message"),
        [
            ("", "agnt:solve", r"no module 'agnt' in .*project or the environment; did you mean 'agent'\?"),
            ("", "agent.inner:solve", r"no module 'agent.inner'"),
            ("def solve(task): ...", "agent:slove", r"'agent' has no 'slove'; did you mean 'solve'\?"),
            ("solve = 3", "agent:solve", "agent:solve cannot be called: it is of type int"),
            ("import absent_dependency", "agent:solve", r"No module named 'absent_dependency' \(agent.py, line 1"),
            ("def solve(:", "agent:solve", "SyntaxError"),
            ("raise SystemExit(3)", "agent:solve", "importing 'agent' failed: SystemExit: 3"),
            ("import os; print('oops'); os._exit(3)", "agent:solve", "exited with status 3 .*: oops"),
        ],
    )
    async def test_what_is_wrong_is_named(self, agent, code, target, message):
        with pytest.raises(UsageError, match=message):
            await agent(code, target).preflight()

    async def test_a_client_made_at_import_is_no_reason_to_refuse(self, agent):
        code = "import os\nKEY, URL = os.environ['OPENAI_API_KEY'], os.environ['OPENAI_BASE_URL']\ndef solve(task): ..."
        await agent(code).preflight()

    async def test_a_variable_that_is_not_set_is_named(self, agent):
        with pytest.raises(UsageError, match="NO_SUCH_VARIABLE"):
            await agent("def solve(task): ...", env=("NO_SUCH_VARIABLE",)).preflight()

    async def test_an_interpreter_that_is_not_there_is_named(self, agent, make_context):
        with pytest.raises(Unavailable, match="/no/such/python"):
            await agent("def solve(task): ...", python="/no/such/python").preflight()
        with pytest.raises(HarnessError, match="/no/such/python"):
            await agent("def solve(task): ...", python="/no/such/python").run(make_context())

    @pytest.mark.parametrize("target", ["agent:", ":solve", "agent.py:solve", "a/agent:solve", "a b:solve"])
    def test_a_target_of_another_form_is_refused(self, target):
        with pytest.raises(ValidationError, match="target"):
            PythonOptions(target=target)


class TestMarkedAgents:
    """``@rl_harness.agent``: a package's name is enough."""

    @pytest.fixture
    def package(self, tmp_path: Path):
        def write(target: str, **modules: str) -> PythonHarness:
            for name, code in {"__init__": "", **modules}.items():
                path = tmp_path / "mine" / (name.replace("__in__", "/") + ".py")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(textwrap.dedent(code))
            return PythonHarness(PythonOptions(target=target, path=tmp_path))

        return write

    SOLVER = """
        import rl_harness
        @rl_harness.agent
        def solve(task):
            return "solved"
        """
    OTHER = """
        from rl_harness import agent
        @agent(name="second")
        async def _function(task):
            return "by the second"
        """

    async def test_the_only_one_of_a_package_is_found_wherever_it_is(self, package, make_context):
        harness = package(
            "mine",
            deep__in____init__="",
            deep__in__solver=self.SOLVER,
            plain="raise SystemExit(3)",
            other__in____init__="1 / 0",
        )
        await harness.preflight()
        assert (await harness.run(make_context())).answer == "solved"

    async def test_one_of_several_is_found_by_name(self, package, make_context):
        harness = package("mine:second", solver=self.SOLVER, other=self.OTHER)
        assert (await harness.run(make_context())).answer == "by the second"

    @pytest.mark.parametrize(
        ("modules", "target", "message"),
        [
            ({}, "mine", "'mine' marks no agent"),
            ({"a": SOLVER, "b": OTHER}, "mine", "'mine' has several agents: second, solve; name one"),
            ({"a": SOLVER, "b": SOLVER}, "mine:solve", "two agents named 'solve'"),
            ({"a": SOLVER}, "mine:slove", "did you mean 'solve'"),
            ({"a": "import rl_harness, absent_one"}, "mine", "No module named 'absent_one'"),
        ],
    )
    async def test_what_cannot_be_found_is_named(self, package, modules, target, message):
        with pytest.raises(UsageError, match=message):
            await package(target, **modules).preflight()

    def test_a_marked_function_is_still_itself(self):
        def solve(task): ...

        assert rl_harness.agent(solve) is solve
        with pytest.raises(ValueError, match="name of an agent"):
            rl_harness.agent(name="a b")(solve)


async def test_workers_start_side_by_side(agent, make_context):
    harness = agent("def solve(task): return task.name")
    results = await asyncio.gather(*(harness.run(make_context(name=f"t{n}")) for n in range(8)))
    assert [result.answer for result in results] == [f"t{n}" for n in range(8)]
