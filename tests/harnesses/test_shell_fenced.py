from __future__ import annotations

import pytest
from rl_harness.contracts import ExecResult
from rl_harness.errors import EngineError, SandboxError
from rl_harness.records.episode import Termination
from rl_harness.records.turn import Message
from rl_harness.rollout.harnesses.shell import ShellHarness, ShellOptions
from rl_harness.testing.chat_server import ScriptedChat, ScriptedReply


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def harness(**options) -> ShellHarness:
    return ShellHarness(ShellOptions(**options))


async def test_acts_sees_the_output_and_answers(make_context, sandbox, events):
    async with ScriptedChat([block("echo 6 > n; cat n"), "The number is 6."]) as chat:
        result = await harness().run(make_context(chat.endpoint, sandbox))
    assert (result.termination, result.answer) == (Termination.ANSWER, "The number is 6.")
    assert chat.requests[1]["messages"][-2:] == [
        {"role": "assistant", "content": block("echo 6 > n; cat n")},
        {"role": "user", "content": "Output:\n6"},
    ]
    assert events[0][0] == "exec"
    assert events[0][1]["exit_code"] == 0


async def test_the_benchmarks_prompt_and_examples_are_sent_as_they_are(make_context, sandbox):
    examples = (
        Message(role="user", content="input.txt has a number. Write its square to answer.txt."),
        Message(role="assistant", content=block("cat input.txt")),
        Message(role="user", content="Output:\n6"),
        Message(role="assistant", content=block("echo $((6 * 6)) > answer.txt")),
    )
    async with ScriptedChat([block("echo 6"), block("true")]) as chat:
        context = make_context(chat.endpoint, sandbox, system="You are {a} shell.", examples=examples, max_turns=2)
        await harness().run(context)
    first, second = (request["messages"] for request in chat.requests)
    assert first[0] == {"role": "system", "content": "You are {a} shell."}
    assert first[1:5] == [{"role": m.role, "content": m.content} for m in examples]
    assert first[5:] == [{"role": "user", "content": "Do it."}]
    assert second[: len(first)] == first
    assert second[-1] == {"role": "user", "content": "Output:\n6"}


async def test_the_last_turns_command_is_carried_out(make_context, sandbox):
    async with ScriptedChat([block("echo 1"), block("echo 36 > answer.txt"), block("echo no")]) as chat:
        result = await harness().run(make_context(chat.endpoint, sandbox, max_turns=2))
    assert result.termination == Termination.TURN_LIMIT
    assert len(chat.requests) == 2
    assert await sandbox.read_file("/app/answer.txt") == b"36\n"


@pytest.mark.parametrize(
    ("command", "observed"),
    [
        ("true", "Output:\n(no output)"),
        ("printf '  a\\n\\n'", "Output:\n  a"),
        ("echo out; exit 3", "Output:\nout\nExit code: 3"),
        ("false | cat; exit ${PIPESTATUS[0]}", "Output:\n(no output)\nExit code: 1"),
        # Nothing of ours stands in a pipe behind the command: the code is what the agent's own shell makes of it.
        ("set -o pipefail; (echo seen; exit 3) | tee log", "Output:\nseen\nExit code: 3"),
        ("(echo seen; exit 3) | tee log", "Output:\nseen"),
        ("(echo seen; exit 3) 2>&1 # | tee log", "Output:\nseen\nExit code: 3"),
        ("kill -9 $$", "Output:\n(no output)\nExit code: 137 (killed by signal 9)"),
        ("printf '\\xff\\xfe ok'", "Output:\n\ufffd\ufffd ok"),
        ("echo 1; echo 2 >&2; echo 3", "Output:\n1\n2\n3"),
        ("cat", "Output:\n(no output)"),
    ],
)
async def test_observations(make_context, sandbox, command, observed):
    async with ScriptedChat([block(command), "done"]) as chat:
        result = await harness().run(make_context(chat.endpoint, sandbox))
    assert result.termination == Termination.ANSWER
    assert chat.requests[1]["messages"][-1]["content"] == observed


async def test_every_command_runs_in_a_new_shell_and_the_agent_is_told(make_context, sandbox):
    async with ScriptedChat([block("export A=1; mkdir d; cd d"), block("echo [$A]; ls"), "done"]) as chat:
        await harness().run(make_context(chat.endpoint, sandbox))
    assert "do not carry over to the next command" in chat.requests[0]["messages"][0]["content"]
    assert chat.requests[2]["messages"][-1]["content"] == "Output:\n[]\nd"


@pytest.mark.needs("userns")
async def test_acts_in_an_isolated_sandbox(make_context, isolated_sandbox):
    replies = [block("pwd; hostname > name; ip addr 2>&1 | grep -c eth0"), block("sleep 60"), "done"]
    async with ScriptedChat(replies) as chat:
        result = await harness(exec_timeout=0.3).run(make_context(chat.endpoint, isolated_sandbox))
    assert result.termination == Termination.ANSWER
    seen = [request["messages"][-1]["content"] for request in chat.requests[1:]]
    assert seen[0].startswith("Output:\n/app\n")
    assert "timed out after 0.3 s" in seen[1]
    assert "Commands run in /app," in chat.requests[0]["messages"][0]["content"]


async def test_a_command_that_exceeds_its_own_timeout_is_an_observation(make_context, sandbox):
    async with ScriptedChat([block("echo before; sleep 60"), "gave up"]) as chat:
        result = await harness(exec_timeout=0.2).run(make_context(chat.endpoint, sandbox))
    assert result.termination == Termination.ANSWER
    observed = chat.requests[1]["messages"][-1]["content"]
    assert observed == "Output:\nbefore\nThe command timed out after 0.2 s and was killed."


async def test_the_deadline_during_a_command_is_the_time_limit(make_context, sandbox):
    async with ScriptedChat([block("sleep 60"), "never asked"]) as chat:
        result = await harness(exec_timeout=30).run(make_context(chat.endpoint, sandbox, seconds=0.5))
    assert result.termination == Termination.TIME_LIMIT
    assert "during a command" in result.detail
    assert len(chat.requests) == 1


async def test_the_deadline_during_a_model_call_is_the_time_limit(make_context, sandbox):
    async with ScriptedChat([ScriptedReply(text="late", delay=60)]) as chat:
        result = await harness().run(make_context(chat.endpoint, sandbox, seconds=0.3))
    assert result.termination == Termination.TIME_LIMIT
    assert "model call" in result.detail


async def test_long_output_keeps_head_and_tail_and_says_what_is_missing(make_context, sandbox):
    async with ScriptedChat([block("echo START; seq 100000; echo END"), "done"]) as chat:
        await harness(output_limit=200).run(make_context(chat.endpoint, sandbox))
    observed = chat.requests[1]["messages"][-1]["content"]
    assert observed.startswith("Output:\nSTART\n1\n2\n")
    assert observed.endswith("99999\n100000\nEND")
    assert "characters left out ...]" in observed
    assert len(observed) < 300


async def test_output_the_sandbox_threw_away_is_marked(make_context, sandbox):
    async with ScriptedChat([block("yes | head -c 3000000"), "done"]) as chat:
        await harness(output_limit=100).run(make_context(chat.endpoint, sandbox))
    observed = chat.requests[1]["messages"][-1]["content"]
    assert observed.endswith("[... output truncated: only its first 100 characters are shown ...]")


@pytest.mark.parametrize(
    ("reply", "correction"),
    [
        (block("echo a > n") + "\n" + block("echo b > n"), "your reply has 2 ```bash blocks"),
        ("```bash\necho a > n", "not closed"),
        (block("echo a > n\0"), "NUL"),
        (block("true " + "a" * 130_000), "longer than"),
    ],
)
async def test_a_reply_that_cannot_be_run_is_corrected_and_costs_a_turn(make_context, sandbox, reply, correction):
    async with ScriptedChat([reply, block("test ! -e n && echo untouched")]) as chat:
        result = await harness().run(make_context(chat.endpoint, sandbox, max_turns=2))
    assert result.termination == Termination.TURN_LIMIT
    messages = chat.requests[1]["messages"]
    assert messages[-1]["role"] == "user"
    assert correction in messages[-1]["content"]
    with pytest.raises(FileNotFoundError):
        await sandbox.read_file("/app/n")


@pytest.mark.parametrize(
    ("reply", "termination"),
    [
        (ScriptedReply(text=""), Termination.NO_ACTION),
        (ScriptedReply(text=" \n"), Termination.NO_ACTION),
        (ScriptedReply(text=None), Termination.NO_ACTION),
        (ScriptedReply(text="half a thou", finish_reason="length"), Termination.TOKEN_LIMIT),
        (ScriptedReply(text="```bash\necho ha", finish_reason="length"), Termination.TOKEN_LIMIT),
        (ScriptedReply(text="It is 4.\n```python\n2 + 2\n```"), Termination.ANSWER),
        (ScriptedReply(status=403, error="turn_limit"), Termination.TURN_LIMIT),
        (ScriptedReply(status=400, error="context_length_exceeded"), Termination.TOKEN_LIMIT),
    ],
)
async def test_every_end_has_its_own_termination(make_context, sandbox, reply, termination):
    async with ScriptedChat([reply]) as chat:
        result = await harness().run(make_context(chat.endpoint, sandbox))
    assert result.termination == termination
    assert (result.answer is not None) == (termination == Termination.ANSWER)


async def test_a_closed_block_in_a_reply_cut_at_the_token_limit_is_run(make_context, sandbox):
    cut = ScriptedReply(text=block("echo ran") + "\nNext I wo", finish_reason="length")
    async with ScriptedChat([cut, "done"]) as chat:
        await harness().run(make_context(chat.endpoint, sandbox))
    assert chat.requests[1]["messages"][-1]["content"] == "Output:\nran"


@pytest.mark.parametrize(
    "reply",
    [
        ScriptedReply(status=500, error="server_error"),
        ScriptedReply(status=503, raw=b"<html>busy"),
        ScriptedReply(status=401, error="invalid_api_key"),
        ScriptedReply(raw=b"not json"),
        ScriptedReply(raw=b'{"choices": []}'),
        ScriptedReply(raw=b'{"choices": [{"message": {"content": 7}}]}'),
    ],
)
async def test_a_failure_of_the_engine_is_raised(make_context, sandbox, reply):
    async with ScriptedChat([reply]) as chat:
        with pytest.raises(EngineError, match="model call"):
            await harness().run(make_context(chat.endpoint, sandbox))


async def test_a_gateway_that_is_gone_is_an_engine_error(make_context, sandbox):
    async with ScriptedChat() as chat:
        endpoint = chat.endpoint
    with pytest.raises(EngineError, match="failed"):
        await harness().run(make_context(endpoint, sandbox))


async def test_a_dead_sandbox_ends_the_episode_at_once(make_context, sandbox, monkeypatch):
    async def dead(*args, **kwargs) -> ExecResult:
        raise SandboxError("the sandbox is gone")

    monkeypatch.setattr(sandbox, "exec", dead)
    async with ScriptedChat(lambda body: block("true")) as chat:
        with pytest.raises(SandboxError):
            await harness().run(make_context(chat.endpoint, sandbox))
    assert len(chat.requests) == 1


class TestLimits:
    async def systems_and_observations(self, chat, make_context, sandbox, task, **options):
        await harness(**options).run(make_context(chat.endpoint, sandbox, max_turns=3, **task))
        return chat.requests[0]["messages"][0]["content"], [
            request["messages"][-1]["content"] for request in chat.requests[1:]
        ]

    async def test_the_built_in_prompt_tells_them_and_the_last_turn_is_announced(self, make_context, sandbox):
        async with ScriptedChat(lambda body: block("echo 1")) as chat:
            system, seen = await self.systems_and_observations(chat, make_context, sandbox, {})
        assert "at most 3 turns and 30 seconds" in system
        assert f"Commands run in {sandbox.native_path('/app')}, each in a new shell" in system
        assert seen == ["Output:\n1", "Output:\n1\nThe next turn is your last."]

    async def test_the_benchmarks_prompt_stays_as_it_is(self, make_context, sandbox):
        async with ScriptedChat(lambda body: block("echo 1")) as chat:
            system, seen = await self.systems_and_observations(chat, make_context, sandbox, {"system": "Be brief."})
        assert system == "Be brief."
        assert seen == ["Output:\n1", "Output:\n1"]

    async def test_placeholders_of_the_benchmarks_prompt_are_filled(self, make_context, sandbox):
        task = {"system": "{max_turns} turns, {time_limit} s, in {workdir}; {other}"}
        async with ScriptedChat(lambda body: block("echo 1")) as chat:
            system, _ = await self.systems_and_observations(chat, make_context, sandbox, task)
        assert system == f"3 turns, 30 s, in {sandbox.native_path('/app')}; {{other}}"

    async def test_they_can_be_added_to_the_benchmarks_prompt(self, make_context, sandbox):
        async with ScriptedChat(lambda body: block("echo 1")) as chat:
            system, seen = await self.systems_and_observations(
                chat, make_context, sandbox, {"system": "Be brief."}, announce_limits=True
            )
        assert system == "Be brief.\n\nYou have at most 3 turns and 30 seconds."
        assert seen[-1].endswith("The next turn is your last.")

    async def test_they_can_be_left_out(self, make_context, sandbox):
        async with ScriptedChat(lambda body: block("echo 1")) as chat:
            system, seen = await self.systems_and_observations(chat, make_context, sandbox, {}, announce_limits=False)
        assert "turns and" not in system
        assert seen == ["Output:\n1", "Output:\n1"]

    async def test_a_near_deadline_is_announced(self, make_context, sandbox):
        async with ScriptedChat([block("echo 1"), "done"]) as chat:
            context = make_context(chat.endpoint, sandbox, seconds=30, time_limit=1000.0)
            await harness().run(context)
        assert "seconds are left." in chat.requests[1]["messages"][-1]["content"]
