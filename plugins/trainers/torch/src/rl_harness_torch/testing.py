"""Random models small enough to build, load and run in a moment, for tests of this package and of those built on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Served in packed steps.
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt2", "deepseek_v3")
#: Served by their own forward: recurrent states, hybrids, chunked attention, sinks, biases.
OWN_FORWARD_FAMILIES = (
    "mamba",
    "mamba2",
    "jamba",
    "bamba",
    "lfm2",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "llama4",
    "gpt_oss",
    "bloom",
    "mpt",
)
#: Where the name of the config class is not the family's, capitalised.
_NAMES = {
    "gemma2": "Gemma2",
    "gpt2": "GPT2",
    "deepseek_v3": "DeepseekV3",
    "qwen3_next": "Qwen3Next",
    "recurrent_gemma": "RecurrentGemma",
    "llama4": "Llama4Text",
    "gpt_oss": "GptOss",
}


def tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model with a byte-level tokenizer to ``folder``.

    ``family`` is one of :data:`FAMILIES` or :data:`OWN_FORWARD_FAMILIES`. Ids 0 to 255 are bytes; 256 is ``<|end|>``,
    which ends a completion. Sliding windows and chunks have 8 tokens. ``overrides`` change the config.
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
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    latent |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
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
        "deepseek_v3": sizes | experts | latent | {"num_key_value_heads": 4},
        "mamba": sizes | {"state_size": 4},
        "mamba2": sizes | {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8},
        "jamba": sizes
        | {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2},
        "bamba": sizes
        | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
        | {"attn_layer_indices": [1]},
        "lfm2": sizes | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        "qwen3_next": sizes
        | experts
        | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
        "recurrent_gemma": sizes | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
        "rwkv": wide
        | {"vocab_size": 257, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
        | {"context_length": 256, "rescale_every": 1},
        "llama4": sizes
        | experts
        | {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48}
        | {"interleave_moe_layer_step": 1},
        "gpt_oss": sizes | experts | {"sliding_window": 8},
        "bloom": wide | {"vocab_size": 257, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "mpt": wide | {"vocab_size": 257, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    }
    config_class: Any = getattr(transformers, f"{_NAMES.get(family, family.capitalize())}Config")
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    config = config_class(**(special | own[family] | overrides))
    factory: Any = AutoModelForCausalLM
    random_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = factory.from_config(config)
    torch.random.set_rng_state(random_state)
    model.save_pretrained(folder)
    wrapper: Any = transformers.PreTrainedTokenizerFast
    wrapper(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)
    return folder
