"""A small byte-level tokenizer folder, so that renderers and gateways can be tested without any model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}

{% endif %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}

<tool_call>
{{ call['function'] | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""ChatML that knows tools and changes nothing of what came before."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(
    folder: Path,
    *,
    template: str | None = CHATML_TEMPLATE,
    merges: tuple[str, ...] = ("th", "he"),
    learned: int = 0,
    special: tuple[str, ...] = SPECIAL_TOKENS,
    end: str = "<|im_end|>",
) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder`` and return it.

    Every byte is a token; ``merges`` adds some of two characters, so that one text has several spellings in ids.
    ``learned``, if given, is the number of tokens beside the special ones, most of them learned from Python's own
    documentation: long prompts then take about as few as with the tokenizers of real models. ``special`` are the tokens
    that are no text, ``end`` the one of them that ends a turn.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    for merge in merges:
        vocabulary[merge] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(merge[0], merge[1]) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if learned:
        from pydoc_data import topics

        trainer = trainers.BpeTrainer(vocab_size=learned, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(list(topics.topics.values()), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"eos_token": end, "bos_token": special[0], "pad_token": special[0]}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
