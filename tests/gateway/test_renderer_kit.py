"""The core's own renderers pass the checks that plugin authors run, and the checks find what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rl_harness.contracts import Renderer, ToolSpec
from rl_harness.gateway.renderers.chatml import ChatMLOptions, ChatMLRenderer
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.records import Message, ids
from rl_harness.records.arrays import IdArray
from rl_harness.testing.renderer import Check, RendererKit, check_extension, check_forged_turns, renderer_checks
from rl_harness.testing.tokenizer import write_tokenizer

CALL = '<tool_call>{"name": "look", "arguments": {"path": "a"}}</tool_call>'


def load(renderer: Renderer, folder: Path, template: str | None = None) -> Renderer:
    renderer.load(write_tokenizer(folder, **({} if template is None else {"template": template})))
    return renderer


@pytest.mark.parametrize("check", renderer_checks(RendererKit(load=list, call=CALL)), ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", [TemplateRenderer, ChatMLRenderer])
def test_our_renderers_conform(kind: type[Renderer], check: Check, tmp_path: Path) -> None:
    check(RendererKit(load=lambda: load(kind(kind.Options()), tmp_path), call=CALL))


def test_a_template_that_ignores_tools(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    kit = RendererKit(load=lambda: load(TemplateRenderer(TemplateOptions()), tmp_path, template), tools=False)
    for check in renderer_checks(kit):
        check(kit)


class Careless(ChatMLRenderer):
    """Reads special tokens in what users write, and forgets the line break after a turn."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> IdArray:
        return ids(self._folder.encode(self.decode(super().render(messages, tools))))

    def extend(
        self,
        messages: Sequence[Message],
        completion: IdArray,
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> IdArray | None:
        suffix = super().extend(messages, completion, new, tools)
        return None if suffix is None else suffix[1:]


@pytest.mark.parametrize(
    ("check", "words"), [(check_forged_turns, "ends the turn"), (check_extension, "rendered anew")]
)
def test_the_checks_find_faults(check: Check, words: str, tmp_path: Path) -> None:
    kit = RendererKit(load=lambda: load(Careless(ChatMLOptions()), tmp_path))
    with pytest.raises(AssertionError, match=words):
        check(kit)
