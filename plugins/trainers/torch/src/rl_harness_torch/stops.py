"""Noticing that a completion just produced one of its stop strings, whichever tokens it came in."""

from __future__ import annotations

from collections.abc import Sequence

from rl_harness.records.arrays import IdArray
from tokenizers import Tokenizer


class StopStrings:
    """Watches one completion. A stop string may begin and end in the middle of a token."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        # A character is at most four bytes and a token at least one, so this many tokens hold any stop string that
        # ends in the newest token, with some to spare for tokens without text.
        self._window = 4 * max((len(text) for text in self._stop), default=0) + 8

    def hit(self, completion: IdArray) -> bool:
        """Whether the newest token completes a stop string."""
        if not self._stop:
            return False
        text = self._tokenizer.decode(completion[-self._window :].tolist(), skip_special_tokens=False)
        return any(stop in text for stop in self._stop)
