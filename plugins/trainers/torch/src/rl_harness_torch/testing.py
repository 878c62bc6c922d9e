"""Random models small enough to build, load and run in a moment, for tests of this package and of those built on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt2")


def tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of ``family`` (see :data:`FAMILIES`) with a byte-level tokenizer to ``folder``.

    Ids 0 to 255 are bytes; 256 is ``<|end|>``, which ends a completion. ``mistral`` and ``gemma2`` have sliding
    windows of 8 tokens. ``overrides`` change the config.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])

    wide = {"initializer_range": 0.4}  # far from uniform, so that a wrong position or mask shows
    sizes: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    sizes |= wide
    own: dict[str, dict[str, Any]] = {
        "llama": sizes,
        "qwen3": sizes,
        "mistral": sizes | {"sliding_window": 8},
        "gemma2": sizes | {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
        "gpt2": {
            "vocab_size": 257,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "initializer_range": 0.4,
        },
    }
    names = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma2", "gpt2": "GPT2"}
    config_class: Any = getattr(transformers, f"{names[family]}Config")
    config = config_class(**(own[family] | overrides), bos_token_id=256, eos_token_id=256, pad_token_id=256)
    factory: Any = AutoModelForCausalLM
    random_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = factory.from_config(config)
    torch.random.set_rng_state(random_state)
    model.save_pretrained(folder)
    wrapper: Any = transformers.PreTrainedTokenizerFast
    wrapper(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)
    return folder
