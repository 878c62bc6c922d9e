"""Tool calls in the form of each model family: read from completions, opened, and taken back by templates.

The templates are small ones of our own, in the shape of the family's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_harness.contracts import Delta
from rl_harness.gateway.renderers.formats import FORMATS, detect
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.records import Message, ToolCall, ids
from rl_harness.testing.tokenizer import CHATML_TEMPLATE, SPECIAL_TOKENS, write_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "times": {"type": "integer"},
                    "options": {"anyOf": [{"$ref": "#/$defs/options"}, {"type": "null"}]},
                    "quiet": {"type": "boolean"},
                    "files": {"type": "array", "items": {"type": "string"}},
                    "limit": {"type": ["number", "null"]},
                },
                "required": ["command"],
                "additionalProperties": False,
                "$defs": {"options": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]

CODER = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}<name>{{ tool.function.name }}</name>{% endfor %}
Call them so: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call><|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}

<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """\
{{- bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

{{ tools | tojson }} Respond with {"name": name, "parameters": {}}.<|eot_id|>{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}{# <|python_tag|> and <|eom_id|> #}"""
PYTHONIC = """\
{{- bos_token }}{% if tools %}<|header_start|>system<|header_end|>

{{ tools | tojson }} Respond with [func_name1(a=1), func_name2(b="x")].<|eot|>{% endif %}
{%- for m in messages %}<|header_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>

{{ m.content }}{% if m.tool_calls %}[{% for call in m.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|eot|>
{%- endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""
_MISTRAL = """\
{{- bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}
{%- for call in m.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
{%- endfor %}{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}</s>
{%- else %}{{ raise_exception('only user, assistant and tool roles') }}{% endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    '[TOOL_CALLS] [{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{{ \', \' if not loop.last }}{% endfor %}]',
)
MISTRAL_ARGS = _MISTRAL.replace(
    "CALLS",
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}",
)
_DEEPSEEK = """\
{{- bos_token }}{% if tools %}{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in m.tool_calls %}<｜tool▁call▁begin｜>CALL<｜tool▁call▁end｜>{% endfor -%}
<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALL<", "function<｜tool▁sep｜>{{ call.function.name }}\n```json\n{{ call.function['arguments'] + '' }}\n```<"
)
DEEPSEEK_V31 = _DEEPSEEK.replace("CALL<", "{{ call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}<")

CALL_TOKENS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
OUTPUT_TOKENS = ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    *CALL_TOKENS,
    *OUTPUT_TOKENS,
)
MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
LLAMA_TOKENS = (
    *("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
)
PYTHONIC_TOKENS = (
    *("<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
)


class Family(NamedTuple):
    template: str
    special: tuple[str, ...]
    end: str


FAMILIES = {
    "hermes": Family(CHATML_TEMPLATE, SPECIAL_TOKENS, "<|im_end|>"),
    "qwen_coder": Family(CODER, SPECIAL_TOKENS, "<|im_end|>"),
    "llama": Family(LLAMA, LLAMA_TOKENS, "<|eot_id|>"),
    "llama_pythonic": Family(PYTHONIC, PYTHONIC_TOKENS, "<|eot|>"),
    "mistral": Family(MISTRAL, MISTRAL_TOKENS, "</s>"),
    "mistral_args": Family(MISTRAL_ARGS, MISTRAL_TOKENS, "</s>"),
    "deepseek_v3": Family(DEEPSEEK_V3, DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>"),
    "deepseek_v31": Family(DEEPSEEK_V31, DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>"),
}
Load = Callable[[str], TemplateRenderer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    root: Path = tmp_path_factory.mktemp("families")
    made: dict[str, TemplateRenderer] = {}

    def one(name: str) -> TemplateRenderer:
        if name not in made:
            family = FAMILIES[name]
            folder = write_tokenizer(root / name, template=family.template, special=family.special, end=family.end)
            made[name] = TemplateRenderer(TemplateOptions())
            made[name].load(folder)
        return made[name]

    return one


def parse(
    renderer: TemplateRenderer, text: str, *, cuts: list[int] | None = None, reason: str = "stop", tools: Any = TOOLS
) -> tuple[list[Delta], Message, tuple[str, ...]]:
    """Feed a completion's ids, cut where ``cuts`` says (by default after each)."""
    tokens = renderer._folder.encode(text)
    borders = list(range(len(tokens))) if cuts is None else sorted(cut % (len(tokens) + 1) for cut in cuts)
    parser = renderer.parser(tools)
    deltas: list[Delta] = []
    for start, stop in zip([0, *borders], [*borders, len(tokens)], strict=True):
        deltas += parser.feed(ids(tokens[start:stop]))
    deltas += parser.finish(reason)
    message = parser.message()
    assert "".join(delta.text for delta in deltas) == message.content
    assert "".join(delta.reasoning for delta in deltas) == (message.reasoning or "")
    assert tuple(delta.tool_call for delta in deltas if delta.tool_call) == message.tool_calls
    return deltas, message, parser.problems


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


LS = ("run", {"command": "ls"})
#: family, completion, what is text of it, the calls
GOLDEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>', "", [LS]),
    (
        "hermes",
        'Look:\n\n<tool_call>{"name": "run", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>\n'
        '<tool_call>{"name": "stop"}</tool_call>',
        "Look:",
        [LS, ("stop", {})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"command": "echo \\"</tool_call>\\""}}</tool_call>done',
        "done",
        [("run", {"command": 'echo "</tool_call>"'})],
    ),
    (
        "qwen_coder",
        "I look.\n<tool_call>\n<function=run>\n<parameter=command>\nls -l\n\n</parameter>\n<parameter=times>\n3\n"
        '</parameter>\n<parameter=options>\n{"a": [1]}\n</parameter>\n<parameter=quiet>\nTrue\n</parameter>\n'
        '<parameter=files>\n["1"]\n</parameter>\n<parameter=limit>\n0.5\n</parameter>\n</function>\n</tool_call>',
        "I look.",
        [
            (
                "run",
                {"command": "ls -l\n", "times": 3, "options": {"a": [1]}, "quiet": True, "files": ["1"], "limit": 0.5},
            )
        ],
    ),
    (
        "qwen_coder",
        "<function=run>\n<parameter=command>\n12\n</parameter>\n<parameter=limit>\nNone\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "",
        [("run", {"command": "12", "limit": None}), ("stop", {})],
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=run>\n<parameter=command>\necho '</function></tool_call>' </parameter> x\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("run", {"command": "echo '</function></tool_call>' </parameter> x"})],
    ),
    ("qwen_coder", '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>', "", [LS]),
    ("qwen_coder", "<tool_call>\n<function=run>\n<parameter=command>\nls\n</function>\n</tool_call>", "", [LS]),
    ("llama", '{"name": "run", "parameters": {"command": "ls"}}', "", [LS]),
    ("llama", '<|python_tag|>{"type": "function", "name": "run", "parameters": {"command": "ls"}}<|eom_id|>', "", [LS]),
    (
        "llama",
        '{"name": "run", "parameters": {"command": "}"}}; {"name": "stop", "parameters": {}}',
        "",
        [("run", {"command": "}"}), ("stop", {})],
    ),
    ("llama", 'Sure.<|python_tag|>{"name": "run", "parameters": {"command": "ls"}}', "Sure.", [LS]),
    ("llama", '<|python_tag|>run.call(command="ls")<|eom_id|>', "", [LS]),
    ("llama", '[run(command="ls")]', "", [LS]),
    (
        "llama_pythonic",
        "[run(command=\"a]'\", times=2, options={'a': None, \"b\": true}, files=['x']), stop()]",
        "",
        [("run", {"command": "a]'", "times": 2, "options": {"a": None, "b": True}, "files": ["x"]}), ("stop", {})],
    ),
    ("llama_pythonic", '<|python_start|>[run("ls")]<|python_end|>', "", [LS]),
    ("llama_pythonic", '{"name": "run", "parameters": {"command": "ls"}}', "", [LS]),
    ("mistral", '[TOOL_CALLS] [{"name": "run", "arguments": {"command": "ls"}}]', "", [LS]),
    (
        "mistral",
        'Yes.[TOOL_CALLS][{"arguments": {"command": "]"}, "name": "run"}, {"name": "stop", "arguments": {}}]',
        "Yes.",
        [("run", {"command": "]"}), ("stop", {})],
    ),
    ("mistral_args", '[TOOL_CALLS]run[ARGS]{"command": "ls"}[TOOL_CALLS]stop[ARGS]{}', "", [LS, ("stop", {})]),
    ("mistral_args", '[TOOL_CALLS]run[CALL_ID]abcDEF123[ARGS]{"command": "ls"}', "", [LS]),
    ("mistral_args", '[TOOL_CALLS]run{"command": "ls"}', "", [LS]),
    ("mistral", '[TOOL_CALLS]run[ARGS]{"command": "ls"}', "", [LS]),
    (
        "deepseek_v3",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n"
        '{"command": "ls"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [LS, ("stop", {})],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [LS, ("stop", {})],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n"
        '{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [LS],
    ),
]
IDS = [f"{family}-{number}" for number, (family, *_) in enumerate(GOLDEN)]


def test_every_family_is_found_by_its_template() -> None:
    assert {name: form.name for name, family in FAMILIES.items() if (form := detect(family.template, ()))} == {
        name: name for name in FAMILIES
    }
    assert set(FAMILIES) == set(FORMATS)


def test_or_by_its_tokens() -> None:
    """A template that only calls a macro, say."""
    for name in ("hermes", "llama", "llama_pythonic", "mistral_args", "deepseek_v3"):
        form = detect("{{ tools }}", {*FORMATS[name].tokens, "<s>"})
        assert form is not None
        assert form.name == name
    assert detect("{{ tools }}", {"<s>"}) is None


@pytest.mark.parametrize(("family", "completion", "content", "calls"), GOLDEN, ids=IDS)
def test_documented_forms(load: Load, family: str, completion: str, content: str, calls: list[Any]) -> None:
    renderer = load(family)
    for text in (completion, completion + FAMILIES[family].end):
        for cuts in (None, []):
            _, message, problems = parse(renderer, text, cuts=cuts)
            assert (message.content, calls_of(message)) == (content, calls)
            assert problems == ()
            assert len({call.id for call in message.tool_calls}) == len(calls)


@pytest.mark.parametrize(("family", "completion", "content", "calls"), GOLDEN, ids=IDS)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=6))
@settings(max_examples=6, deadline=None)
def test_wherever_a_chunk_ends(
    load: Load, family: str, completion: str, content: str, calls: list[Any], cuts: list[int]
) -> None:
    _, message, _ = parse(load(family), completion, cuts=cuts)
    assert (message.content, calls_of(message)) == (content, calls)


fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=run>", "</function>", "<parameter=command>", "</parameter>"),
        *(
            "[TOOL_CALLS]",
            "[ARGS]",
            "[run(",
            ")]",
            "[run]",
            "[",
            "]",
            "[{",
            "run",
            "function",
            "x=1",
            "ls",
            "```json\n",
        ),
        *(
            '{"name": "run", "',
            'arguments": {}}',
            '"parameters": {}}',
            "{",
            "}",
            "; ",
            "\n",
            " ",
            '"',
            "<｜",
            "<|py",
            "</",
        ),
        *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<think>", "</think>", *CALL_TOKENS),
    ]
)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    pieces=st.lists(fragments, max_size=9),
    cuts=st.lists(st.integers(0, 10_000), max_size=5),
    reason=st.sampled_from(["stop", "length"]),
)
@settings(max_examples=40, deadline=None)
def test_any_completion_is_read_the_same_in_any_chunks(
    load: Load, family: str, pieces: list[str], cuts: list[int], reason: str
) -> None:
    renderer = load(family)
    text = "".join(pieces)
    _, whole, _ = parse(renderer, text, cuts=[], reason=reason)
    _, each, _ = parse(renderer, text, reason=reason)
    _, some, _ = parse(renderer, text, cuts=cuts, reason=reason)
    seen = [(m.content, m.reasoning, [(c.name, c.arguments) for c in m.tool_calls]) for m in (whole, each, some)]
    assert seen[0] == seen[1] == seen[2]
    for token in renderer._folder.special:
        assert token not in whole.content
    if not any(whole.tool_calls) and whole.reasoning is None:
        kept = text
        for token in renderer._folder.special:
            kept = kept.replace(token, "")
        assert "".join(whole.content.split()) == "".join(kept.split()) or "<think>" in text


TEXTS = ("{ not a call", '{"answer": 1}', "[1, 2]", "[run] is a link", "<b>bold</b>", "a < b", "[TOOL", "f(x)", "; {")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_text_that_is_like_a_call_is_text(load: Load, family: str, text: str) -> None:
    _, message, _ = parse(load(family), text)
    assert (message.content, message.tool_calls) == (text, ())


@pytest.mark.parametrize("family", FAMILIES)
def test_text_comes_out_at_once(load: Load, family: str) -> None:
    """It is held back only while it can still become a call."""
    renderer = load(family)
    parser = renderer.parser(TOOLS)
    text = ""
    for number, character in enumerate('{"a": 1, <b> [x] }', 1):
        text += "".join(delta.text for delta in parser.feed(ids(renderer._folder.encode(character))))
        held = ('{"a": 1, <b> [x] }'[:number]).removeprefix(text)
        assert held.strip() in ("", "{", '{"', '{"a', "<", "["), held


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_take_back_what_was_read(load: Load, family: str) -> None:
    """Render, read, compare: the conversation goes on from the recorded ids."""
    renderer = load(family)
    arguments = {"command": "ls 'é' \"x\"\n", "times": 2, "options": {"a": [True, None]}, "files": ["a"]}
    call = ToolCall(id="call_abc", name="run", arguments=json.dumps(arguments))
    question = [Message(role="user", content="q")]
    prompt = renderer.decode(renderer.render(question, TOOLS))
    reply = Message(role="assistant", tool_calls=(call,))
    whole = renderer.decode(
        renderer.render([*question, reply, Message(role="tool", content="out", tool_call_id="call_abc")], TOOLS)
    )
    assert whole.startswith(prompt)
    end = FAMILIES[family].end
    said = whole[len(prompt) :].partition(end)[0]
    _, message, problems = parse(renderer, said + end)
    assert calls_of(message) == [("run", arguments)]
    assert problems == ()
    result = Message(role="tool", content="out", tool_call_id=message.tool_calls[0].id)
    completion = ids(renderer._folder.encode(said + end))
    suffix = renderer.extend([*question, message], completion, [result], TOOLS)
    assert suffix is not None
    assert "out" in renderer.decode(suffix)
    assert end not in renderer.decode(suffix)[: len(end)]
    cut = renderer.extend([*question, message], completion[:-1], [result], TOOLS)
    assert cut is not None
    assert cut[1:].tolist() == suffix.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_around_replies_reads_as_one_of_their_text(load: Load, family: str) -> None:
    """Where history was rewritten, replies keep their ids: of replies spelled as the template would, it is the same."""
    renderer = load(family)
    end = FAMILIES[family].end
    call = ToolCall(id="call_abc", name="run", arguments='{"command": "ls"}')
    messages = [Message(role="user", content="q")]
    completions = {}
    for reply, answer in (
        (Message(role="assistant", tool_calls=(call,)), Message(role="tool", content="out", tool_call_id="call_abc")),
        (Message(role="assistant", content="done"), Message(role="user", content="r")),
    ):
        prompt = renderer.decode(renderer.render(messages, TOOLS))
        whole = renderer.decode(renderer.render([*messages, reply, answer], TOOLS))
        said = whole[len(prompt) :].partition(end)[0] + end
        completions[len(messages)] = ids(renderer._folder.encode(said))
        messages += [reply, answer]
    replayed = renderer.replay(messages, completions, TOOLS)
    assert replayed is not None
    assert renderer.decode(replayed) == renderer.decode(renderer.render(messages, TOOLS))
    cut = {position: completion[:-1] for position, completion in completions.items()}
    assert renderer.replay(messages, cut, TOOLS).tolist() == replayed.tolist()  # type: ignore[union-attr]


#: The tools stand before the last question, wherever that is.
MOVES = MISTRAL.replace("{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}", "").replace(
    "{%- if m.role == 'user' %}",
    "{%- if m.role == 'user' %}{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}",
)


def test_tools_that_move_are_a_rewrite_that_keeps_replies(tmp_path: Path) -> None:
    family = FAMILIES["mistral"]
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(write_tokenizer(tmp_path / "m", template=MOVES, special=family.special, end=family.end))
    reply = Message(role="assistant", content="the end")
    spelled = ids([*(renderer._folder.encode(c)[0] for c in "the end"), *renderer.end_token_ids])
    messages = [Message(role="user", content="q"), reply, Message(role="user", content="r")]
    assert renderer.extend(messages[:2], spelled, messages[2:], TOOLS) is None
    replayed = renderer.replay(messages, {1: spelled}, TOOLS)
    assert replayed is not None
    text = renderer.decode(replayed)
    assert text.startswith("<s>[INST]q[/INST]the end</s>[AVAILABLE_TOOLS]")
    assert text.endswith("[INST]r[/INST]")
    whole = replayed.tolist()
    assert any(whole[at : at + len(spelled)] == spelled.tolist() for at in range(len(whole)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [None, "run"])
def test_an_opened_call_is_gone_on_with(load: Load, family: str, name: str | None) -> None:
    """What ``call_opening`` puts into the prompt, and a completion that goes on from there, are a call."""
    renderer = load(family)
    rest = {
        "hermes": (
            '{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>',
            ' {"command": "ls"}}\n</tool_call>',
        ),
        "qwen_coder": (
            "run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
            "<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        ),
        "llama": ('run", "parameters": {"command": "ls"}}', ' {"command": "ls"}}'),
        "llama_pythonic": ('run(command="ls")]', 'command="ls")]'),
        "mistral": ('"name": "run", "arguments": {"command": "ls"}}]', ' {"command": "ls"}}]'),
        "mistral_args": ('run[ARGS]{"command": "ls"}', '{"command": "ls"}'),
        "deepseek_v3": (
            'run\n```json\n{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            '{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        "deepseek_v31": (
            'run<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            '{"command": "ls"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
    }[family]
    opening = renderer.call_opening(name)
    assert opening is not None
    parser = renderer.parser(TOOLS)
    assert parser.feed(opening) == []
    parser.feed(ids(renderer._folder.encode(rest[0 if name is None else 1] + FAMILIES[family].end)))
    parser.finish("stop")
    assert (parser.message().content, calls_of(parser.message())) == ("", [LS])


@pytest.mark.parametrize(
    ("family", "completion", "name", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "run", "arguments": {"command": NaN}}</tool_call>', "run", '{"command": NaN}'),
        ("hermes", '<tool_call>{"name": "run", "arguments": [1]}</tool_call>', "run", "[1]"),
        ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "ls"}</tool_call>', "run", '{"command": "ls"}'),
        (
            "hermes",
            '<tool_call>{"name": "run", "arguments": {"command": "a" "b"}}</tool_call>',
            "run",
            '{"command": "a" "b"}',
        ),
        ("hermes", '<tool_call>{"name": "run", "arguments": {"a": 1e999}}</tool_call>', "run", '{"a": 1e999}'),
        ("hermes", '<tool_call>{"name": "run", "arguments": "ls"}', "run", "ls"),
        ("llama", '{"name": "run", "parameters": {"command": ls}}', "run", '{"command": ls}'),
        ("mistral", '[TOOL_CALLS] [{"name": "run", "arguments": {"command": ls}}]', "run", '{"command": ls}'),
        ("mistral_args", '[TOOL_CALLS]run[ARGS]{"command": ls}', "run", '{"command": ls}'),
        ("mistral_args", "[TOOL_CALLS]run[ARGS]ls", "run", "ls"),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{ls}\n```<｜tool▁call▁end｜>",
            "run",
            "{ls}",
        ),
        ("deepseek_v31", "<｜tool▁call▁begin｜>run<｜tool▁sep｜>ls<｜tool▁call▁end｜>", "run", "ls"),
    ],
)
def test_broken_arguments_are_delivered_as_they_are(
    load: Load, family: str, completion: str, name: str, arguments: str
) -> None:
    """Agents answer such a call with an error, and the model can try again."""
    for cuts in (None, []):
        _, message, problems = parse(load(family), completion, cuts=cuts)
        assert [(call.name, call.arguments) for call in message.tool_calls] == [(name, arguments)]
        assert message.content == ""
        assert len(problems) == (0 if arguments == '{"command": "ls"}' else 1)


@pytest.mark.parametrize(
    ("family", "completion", "content"),
    [
        ("mistral", "[TOOL_CALLS] [1]", " [1]"),
        ("mistral_args", "[TOOL_CALLS]I would rather not", "I would rather not"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no<｜tool▁call▁end｜>", "no"),
        ("llama", '<|python_tag|>print("x")', None),
        ("llama", "<|python_tag|>import os", "import os"),
    ],
)
def test_special_tokens_never_become_text(load: Load, family: str, completion: str, content: str | None) -> None:
    _, message, _ = parse(load(family), completion)
    if content is not None:
        assert (message.content, message.tool_calls) == (content, ())


def test_a_call_cut_by_the_length_is_no_call(load: Load) -> None:
    """Half a command must not be run."""
    for family, completion, _, _ in GOLDEN:
        if family in ("llama", "llama_pythonic", "mistral_args") or completion.endswith("done"):
            continue
        renderer = load(family)
        tokens = renderer._folder.encode(completion)
        for keep in (len(tokens) // 2, len(tokens) - 25):
            cut = renderer.decode(ids(tokens[:keep]))
            _, message, _ = parse(renderer, cut, reason="length")
            _, every, _ = parse(renderer, completion)
            allowed = calls_of(every)
            assert calls_of(message) == allowed[: len(message.tool_calls)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"command": "ls"}, None),
        ({"command": 1}, "run: command is 1, not of type string"),
        ({}, "run: command is missing"),
        ({"command": "ls", "more": 1}, "run: more is not allowed"),
        ({"command": "ls", "files": ["a", 2]}, "run: files[1] is 2, not of type string"),
        ({"command": "ls", "options": None}, None),
        ({"command": "ls", "options": 3}, "run: options fits none of anyOf"),
    ],
)
def test_what_does_not_fit_the_schema_is_delivered_and_noted(
    load: Load, arguments: dict[str, Any], problem: str | None
) -> None:
    text = json.dumps({"name": "run", "arguments": arguments})
    _, message, problems = parse(load("hermes"), f"<tool_call>{text}</tool_call>")
    assert calls_of(message) == [("run", arguments)]
    assert problems == (() if problem is None else (problem,))


def test_an_unknown_tool_is_delivered_and_noted(load: Load) -> None:
    _, message, problems = parse(load("hermes"), '<tool_call>{"name": "fly", "arguments": {}}</tool_call>')
    assert calls_of(message) == [("fly", {})]
    assert problems == ("fly: there is no such tool",)


def test_an_unclosed_string_does_not_swallow_the_next_call(load: Load) -> None:
    broken = '<tool_call>{"name": "run", "arguments": {"command": "ls}}</tool_call>'
    for cuts in (None, []):
        _, message, _ = parse(load("hermes"), f'{broken}<tool_call>{{"name": "stop"}}</tool_call>', cuts=cuts)
        assert [(call.name, call.arguments) for call in message.tool_calls] == [
            ("run", '{"command": "ls}'),
            ("stop", "{}"),
        ]


def test_a_call_that_never_ends_costs_no_more_than_its_length(load: Load) -> None:
    """A model that has gone astray writes brackets for ever; each is a possible end."""
    renderer = load("llama")
    parser = renderer.parser(TOOLS)
    reads = 0
    form = renderer._form
    assert form is not None

    class Counted(type(form)):  # type: ignore[misc]
        def read(self, *how: Any, **more: Any) -> Any:
            nonlocal reads
            reads += 1
            return super().read(*how, **more)

    parser._form = Counted()
    tokens = renderer._folder.encode('{"name": ' + "{}[]" * 5000)
    for token in tokens:
        parser.feed(ids([token]))
    parser.finish("length")
    assert len(parser.message().content) > 20_000
    assert reads < 4500


def test_what_was_no_call_does_not_hold_up_the_next(load: Load) -> None:
    renderer = load("hermes")
    parser = renderer.parser(TOOLS)
    deltas: list[Delta] = []
    call = json.dumps({"name": "run", "arguments": {"command": "x" * 400}})
    for chunk in ("y" * 600 + "<tool_", "x", f"<tool_call>{call}</tool_call>"):
        deltas += parser.feed(ids(renderer._folder.encode(chunk)))
    assert [delta.tool_call.name for delta in deltas if delta.tool_call] == ["run"]


def test_ids_that_a_model_gives_are_kept(load: Load) -> None:
    _, message, _ = parse(load("mistral_args"), '[TOOL_CALLS]run[CALL_ID]abcDEF123[ARGS]{"command": "ls"}')
    assert [call.id for call in message.tool_calls] == ["abcDEF123"]


def test_several_calls_of_a_template_that_knows_one(load: Load) -> None:
    """The model did call two tools: the conversation goes on from there although the template would refuse it."""
    renderer = load("llama")
    text = '{"name": "run", "parameters": {"command": "ls"}}; {"name": "stop", "parameters": {}}<|eot_id|>'
    _, message, _ = parse(renderer, text)
    assert len(message.tool_calls) == 2
    question = [Message(role="user", content="q")]
    results = [Message(role="tool", content=call.name, tool_call_id=call.id) for call in message.tool_calls]
    completion = ids(renderer._folder.encode(text))
    assert renderer.extend([*question, message], completion, results, TOOLS) is not None
    later = [*question, message, *results, Message(role="assistant", content="done")]
    assert renderer.extend(later, ids([5]), [Message(role="user", content="r")], TOOLS) is not None


def test_thoughts_before_a_call_of_a_template_that_knows_none(load: Load) -> None:
    """It would leave out what stands beside a call: that is no rewriting, the model did say it."""
    renderer = load("llama")
    text = '<think>hm</think>{"name": "stop", "parameters": {}}<|eot_id|>'
    _, message, _ = parse(renderer, text)
    assert (message.reasoning, calls_of(message)) == ("hm", [("stop", {})])
    messages = [Message(role="user", content="q"), message]
    completion = ids(renderer._folder.encode(text))
    assert renderer.extend(messages, completion, [Message(role="tool", content="out")], TOOLS) is not None
    replayed = renderer.replay([*messages, Message(role="tool", content="out")], {1: completion}, TOOLS)
    assert replayed is not None
    assert text in renderer.decode(replayed)


def test_a_call_may_have_an_end_of_its_own(load: Load, tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    folder = write_tokenizer(tmp_path / "m", template=family.template, special=family.special, end=family.end)
    number = load("llama")._folder.special["<|eom_id|>"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [number]}))
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(folder)
    call = ToolCall(id="c", name="run", arguments="{}")
    reply = Message(role="assistant", tool_calls=(call,))
    suffix = renderer.extend(
        [Message(role="user", content="q"), reply],
        ids(renderer._folder.encode('<|python_tag|>{"name": "run", "parameters": {}}<|eom_id|>')),
        [Message(role="tool", content="out")],
        TOOLS,
    )
    assert suffix is not None
    assert renderer.decode(suffix).startswith("<|start_header_id|>ipython")


def test_tokens_that_structure_a_conversation_are_special(tmp_path: Path) -> None:
    """DeepSeek declares only some so: nobody ends a turn by writing the others."""
    family = FAMILIES["deepseek_v3"]
    folder = write_tokenizer(tmp_path / "m", template=family.template, special=family.special, end=family.end)
    declared = json.loads((folder / "tokenizer.json").read_text())
    for token in declared["added_tokens"]:
        token["special"] = "sentence" in token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(declared))
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(folder)
    prompt = renderer.render([Message(role="user", content="x<｜Assistant｜>y<｜tool▁calls▁begin｜>")])
    assert prompt.tolist().count(renderer._folder.special["<｜Assistant｜>"]) == 1
    assert renderer.decode(prompt).count("<｜Assistant｜>") == 2
    _, message, _ = parse(renderer, "a<｜User｜>b")
    assert message.content == "ab"


THINKS = CHATML_TEMPLATE.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")


def test_a_call_is_opened_after_the_reasoning_that_the_prompt_opened(tmp_path: Path) -> None:
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(write_tokenizer(tmp_path / "m", template=THINKS))
    opening = renderer.call_opening("run")
    assert opening is not None
    parser = renderer.parser(TOOLS)
    parser.feed(opening)
    parser.feed(ids(renderer._folder.encode(' {"command": "ls"}}\n</tool_call>')))
    parser.finish("stop")
    assert (parser.message().reasoning, calls_of(parser.message())) == (None, [LS])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hm</think>\n\n4", "hm", "4"),
        ("<think>\nhm\n</think>4", "hm", "4"),
        ("\n<think>hm", "hm", ""),
        ("</think>4", None, "4"),
        ("<thinking is hard</think>4", "<thinking is hard", "4"),
    ],
)
def test_reasoning_that_the_prompt_opened(tmp_path: Path, text: str, reasoning: str | None, content: str) -> None:
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(write_tokenizer(tmp_path / "m", template=THINKS))
    for cuts in (None, []):
        _, message, _ = parse(renderer, text, cuts=cuts)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_another_familys_reasoning(load: Load) -> None:
    _, message, _ = parse(load("mistral"), '[THINK]hm[/THINK]Yes.[TOOL_CALLS] [{"name": "stop", "arguments": {}}]')
    assert (message.reasoning, message.content, calls_of(message)) == ("hm", "Yes.", [("stop", {})])
