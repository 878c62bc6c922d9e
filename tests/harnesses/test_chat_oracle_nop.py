from __future__ import annotations

import pytest
from rl_harness.errors import EngineError, TaskError
from rl_harness.records.episode import Termination
from rl_harness.records.turn import Message
from rl_harness.rollout.harnesses.chat import ChatHarness, ChatOptions
from rl_harness.rollout.harnesses.nop import NopHarness
from rl_harness.rollout.harnesses.oracle import OracleHarness
from rl_harness.testing.chat_server import ScriptedChat, ScriptedReply


class TestChat:
    async def test_the_reply_is_the_answer(self, make_context):
        example = Message(role="user", content="1+1?"), Message(role="assistant", content="2")
        async with ScriptedChat(["4"]) as chat:
            context = make_context(chat.endpoint, instruction="2+2?", system="Be right.", examples=example)
            result = await ChatHarness(ChatOptions(system="unused")).run(context)
        assert (result.termination, result.answer) == (Termination.ANSWER, "4")
        assert [m["content"] for m in chat.requests[0]["messages"]] == ["Be right.", "1+1?", "2", "2+2?"]
        assert "tools" not in chat.requests[0]

    @pytest.mark.parametrize(
        ("reply", "termination", "answer"),
        [
            (ScriptedReply(text="def f(", finish_reason="length"), Termination.TOKEN_LIMIT, "def f("),
            (ScriptedReply(text=""), Termination.NO_ACTION, None),
            (ScriptedReply(status=400, error="context_length_exceeded"), Termination.TOKEN_LIMIT, None),
        ],
    )
    async def test_other_ends(self, make_context, reply, termination, answer):
        async with ScriptedChat([reply]) as chat:
            result = await ChatHarness(ChatOptions()).run(make_context(chat.endpoint))
        assert (result.termination, result.answer) == (termination, answer)

    async def test_engine_failures_pass_through(self, make_context):
        async with ScriptedChat([ScriptedReply(status=502, error="bad_gateway")]) as chat:
            with pytest.raises(EngineError, match="502"):
                await ChatHarness(ChatOptions()).run(make_context(chat.endpoint))


class TestOracle:
    def oracle(self):
        return OracleHarness(OracleHarness.Options())

    @pytest.mark.needs("userns")
    async def test_runs_the_solution_in_the_working_directory(self, make_context, isolated_sandbox, tmp_path):
        solution = tmp_path / "solution"
        solution.mkdir()
        (solution / "solve.sh").write_text('cat "$(dirname "$0")/data" > answer.txt\necho $ANSWER\n')
        (solution / "data").write_text("from the solution")
        context = make_context(sandbox=isolated_sandbox, solution=solution, solution_env={"ANSWER": "42"})
        result = await self.oracle().run(context)
        assert (result.termination, result.answer) == (Termination.ANSWER, "42")
        assert await isolated_sandbox.read_file("/app/answer.txt") == b"from the solution"

    @pytest.mark.needs("userns")
    async def test_a_failing_solution_is_named_with_its_last_words(self, make_context, isolated_sandbox, tmp_path):
        (tmp_path / "solution").mkdir()
        (tmp_path / "solution" / "solve.sh").write_text("echo no such tool >&2\nexit 3\n")
        result = await self.oracle().run(make_context(sandbox=isolated_sandbox, solution=tmp_path / "solution"))
        assert result.termination == Termination.AGENT_ERROR
        assert result.detail == "solution/solve.sh exited with 3: no such tool"

    @pytest.mark.needs("userns")
    async def test_a_hanging_solution_meets_the_agents_time_limit(self, make_context, isolated_sandbox, tmp_path):
        (tmp_path / "solution").mkdir()
        (tmp_path / "solution" / "solve.sh").write_text("sleep 60\n")
        result = await self.oracle().run(
            make_context(sandbox=isolated_sandbox, solution=tmp_path / "solution", seconds=0.3)
        )
        assert result.termination == Termination.TIME_LIMIT

    async def test_without_a_sandbox_the_written_answer_is_given(self, make_context, tmp_path):
        (tmp_path / "answer.txt").write_text("42\n")
        result = await self.oracle().run(make_context(solution=tmp_path))
        assert (result.termination, result.answer) == (Termination.ANSWER, "42")

    async def test_what_is_missing_is_named(self, make_context, sandbox, tmp_path):
        with pytest.raises(TaskError, match="no solution directory"):
            await self.oracle().run(make_context(sandbox=sandbox))
        with pytest.raises(TaskError, match=r"solve\.sh"):
            await self.oracle().run(make_context(sandbox=sandbox, solution=tmp_path))
        with pytest.raises(TaskError, match=r"answer\.txt"):
            await self.oracle().run(make_context(solution=tmp_path))


async def test_nop_does_nothing(make_context, sandbox):
    result = await NopHarness(NopHarness.Options()).run(make_context(sandbox=sandbox))
    assert (result.termination, result.answer) == (Termination.ANSWER, "")
