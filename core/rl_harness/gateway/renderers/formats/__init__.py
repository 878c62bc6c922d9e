"""How model families write tool calls: one module a family, found from a chat template or by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rl_harness.gateway.renderers.formats.base import Found, ToolFormat
from rl_harness.gateway.renderers.formats.deepseek import DeepSeekV3, DeepSeekV31
from rl_harness.gateway.renderers.formats.hermes import Hermes
from rl_harness.gateway.renderers.formats.llama import Llama, LlamaPythonic
from rl_harness.gateway.renderers.formats.mistral import Mistral, MistralArgs
from rl_harness.gateway.renderers.formats.qwen_coder import QwenCoder

__all__ = ["FORMATS", "Found", "ToolFormat", "detect"]

#: In the order in which they are looked for: what is told by more comes before what is told by less.
_ALL: tuple[ToolFormat, ...] = (
    DeepSeekV3(),
    DeepSeekV31(),
    MistralArgs(),
    Mistral(),
    QwenCoder(),
    Hermes(),
    LlamaPythonic(),
    Llama(),
)

FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _ALL}
"""Every format by its name."""


def detect(template: str, tokens: Collection[str]) -> ToolFormat | None:
    """The format that a chat template writes calls in; where the template does not show it, the one that the
    tokenizer has tokens for. None if neither tells."""
    for form in _ALL:
        if form.written_by(template):
            return form
    for form in _ALL:
        # Where the template does use such tokens, it is for another form.
        if form.tokens and form.tokens <= set(tokens) and not any(token in template for token in form.tokens):
            return form
    return None
