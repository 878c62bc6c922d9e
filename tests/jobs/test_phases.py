"""When a phase is finished, and what is left of it to a run that continues."""

from __future__ import annotations

import pytest
from rl_harness.jobs.phases import Phase, is_complete
from rl_harness.records import SamplingParams
from rl_harness.tasks import load_task, new_task
from rl_harness.testing.records import an_episode


@pytest.mark.parametrize(
    ("episodes", "complete"),
    [
        ([an_episode("job", 1.0), an_episode("job", 0.0, sample=1)], True),
        ([an_episode("job", 1.0)], False),
        ([an_episode("job", 1.0), an_episode("job", None, sample=1)], False),
        ([an_episode("job", 1.0), an_episode("job", None, sample=1, attempt=3)], True),
    ],
    ids=["scored", "missing", "interrupted before its retries", "retries used up"],
)
def test_an_unscored_episode_with_retries_left_is_unfinished(tmp_path, episodes, complete):
    """A run that was interrupted before a retry read as done, and the same command never retried."""
    task = load_task(new_task(tmp_path / "job"))
    phase = Phase(name="evaluate", split="heldout", tasks=(task,), samples=2, sampling=SamplingParams())
    assert is_complete(phase, episodes, retries=2) is complete
