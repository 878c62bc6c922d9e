"""From scored episodes to what a backend trains on: credit, advantages, aggregation, the prefix trie, losses.

Pure numpy: no torch, no sandboxes, no I/O. ``__all__`` is what algorithm and backend plugins may use.
"""

from rl_harness.learning.advantages import group_advantages
from rl_harness.learning.aggregation import Aggregate, weighted
from rl_harness.learning.credit import discounts, returns
from rl_harness.learning.losses import check_loss, load_loss
from rl_harness.learning.samples import check_samples, check_sampling, samples_of
from rl_harness.learning.trie import Packed, pack

__all__ = [
    "Aggregate",
    "Packed",
    "check_loss",
    "check_samples",
    "check_sampling",
    "discounts",
    "group_advantages",
    "load_loss",
    "pack",
    "returns",
    "samples_of",
    "weighted",
]
