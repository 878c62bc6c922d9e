"""The line that evaluates an agent trains the model behind it: an unmodified program with a tiny model of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness_cli_agents.testing_training import VOCABULARY, check_training

pytestmark = [pytest.mark.needs("userns", "torch"), pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.needs("pi")
def test_the_model_behind_an_agent_is_trained(tmp_path: Path) -> None:
    from rl_harness_torch.testing import tiny_model

    model = tiny_model(tmp_path / "model", vocab_size=VOCABULARY, max_position_embeddings=32768)
    check_training(tmp_path, model, "pi")
