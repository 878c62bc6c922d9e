"""One episode, many episodes, and the built-in harnesses."""

from rl_harness.rollout.episode import Attempt, EpisodeRunner
from rl_harness.rollout.many import run_attempts

__all__ = ["Attempt", "EpisodeRunner", "run_attempts"]
