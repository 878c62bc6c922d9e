"""From scored episodes to what a backend trains on: credit, advantages, aggregation, the prefix trie, losses.

Pure numpy: no torch, no sandboxes, no I/O. Nothing here knows backends; they may use what this module exports.
"""

from rl_harness.learning.samples import check_samples
from rl_harness.learning.trie import Packed, pack

__all__ = ["Packed", "check_samples", "pack"]
