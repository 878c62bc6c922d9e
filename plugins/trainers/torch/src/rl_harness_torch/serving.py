"""Choosing how a loaded model is computed: in packed steps if it can be, else by its own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_harness.errors import Unsupported
from tokenizers import Tokenizer

from rl_harness_torch.attention import PackedModel
from rl_harness_torch.faithful import check_decoder_only
from rl_harness_torch.own_forward import OwnModel
from rl_harness_torch.own_scheduler import OwnScheduler
from rl_harness_torch.packed_scheduler import PackedScheduler
from rl_harness_torch.scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def scheduler_for(
    model: PreTrainedModel, tokenizer: Tokenizer, end_token_ids: Sequence[int], limits: Limits
) -> tuple[Scheduler[Any], str | None]:
    """A scheduler for ``model``, and how and why it is slower than packed steps if it is.

    Raises :class:`~rl_harness.errors.Unsupported` for an encoder-decoder model and for one that is not causal.
    """
    check_decoder_only(model)
    try:
        return PackedScheduler(PackedModel(model), tokenizer, end_token_ids, limits), None
    except Unsupported as error:
        why = error.message
    own = OwnModel(model)
    return OwnScheduler(own, tokenizer, end_token_ids, limits), f"served {own.how}, which is slower: {why}"
