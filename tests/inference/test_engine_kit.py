"""The scripted engine keeps the engine contract, and is found through its plugin file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rl_harness.contracts import GenerateRequest, TokenEngine
from rl_harness.errors import ConfigError, EngineError, Unavailable
from rl_harness.plugins import load_registry
from rl_harness.records import SamplingParams, ids
from rl_harness.testing.engine import SCRIPTED_PLUGIN, ScriptedEngine, ScriptedOptions
from rl_harness.testing.token_engine import Check, EngineKit, engine_checks
from rl_harness.testing.tokenizer import write_tokenizer


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[EngineKit]:
    engine = ScriptedEngine(ScriptedOptions(replies=("a reply of more than sixteen tokens",)))
    info = await engine.start(str(write_tokenizer(tmp_path)))
    yield EngineKit(engine=engine, info=info, prompt=[1, 2, 3], seeded=False)
    await engine.close()


@pytest.mark.parametrize("check", engine_checks(seeded=False), ids=lambda check: check.__name__)
async def test_the_scripted_engine_conforms(check: Check, kit: EngineKit) -> None:
    await check(kit)


async def said(engine: TokenEngine, prompt: str) -> str:
    assert isinstance(engine, ScriptedEngine)
    tokenizer = engine._tokenizer
    assert tokenizer is not None
    request = GenerateRequest(id="r", prompt=ids(tokenizer.encode(prompt).ids), sampling=SamplingParams())
    tokens = [token async for chunk in engine.generate(request) for token in chunk.ids.tolist()]
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


async def test_it_is_chosen_through_its_plugin_file(tmp_path: Path) -> None:
    options = {"rules": [{"match": r"two and two\?", "reply": "4"}], "replies": ["one", [65, 66]]}
    engine = load_registry([SCRIPTED_PLUGIN]).create("engines", "scripted", options)
    assert isinstance(engine, TokenEngine)
    await engine.start(str(write_tokenizer(tmp_path / "model")))
    assert await said(engine, "how much is two and two?") == "4<|im_end|>"
    # Others are answered in order, over and over; ids are given as they are.
    assert [await said(engine, "x") for _ in range(3)] == ["one<|im_end|>", "bc", "one<|im_end|>"]


async def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.rules"):
        ScriptedEngine(ScriptedOptions.model_validate({"rules": [{"match": "(", "reply": "x"}]}))
    with pytest.raises(Unavailable, match=r"tokenizer\.json does not exist"):
        await ScriptedEngine(ScriptedOptions()).start(str(tmp_path))
    folder = str(write_tokenizer(tmp_path))
    with pytest.raises(Unavailable, match="no token '<end>'"):
        await ScriptedEngine(ScriptedOptions(end_token="<end>")).start(folder)
    silent = ScriptedEngine(ScriptedOptions())
    await silent.start(folder)
    with pytest.raises(EngineError, match="no reply"):
        await said(silent, "x")
    with pytest.raises(EngineError, match="was not prepared"):
        await silent.commit(1)
