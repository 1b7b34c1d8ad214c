"""A small Llama with random weights that make attention matter.

vLLM's own dummy weights are so small that the next token hardly depends on the KV cache: a load that
copied nothing would go unnoticed. Here queries and keys are large enough for attention to pick single
tokens, and values large enough to decide what comes next.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 2048
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD = 256, 512, 8, 4, 32


def write_model(directory: Path, *, layers: int = 4, seed: int = 1, **changes: object) -> str:
    """Write config and weights; return the directory as a model name. ``changes`` go into the config."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(layers, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def _weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul(gain * float(columns) ** -0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, _HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{at}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD, _HIDDEN, 1.5),
            f"{at}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN, 1.5),
            f"{at}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN, 2.0),
            f"{at}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD, 2.0),
            f"{at}.mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
        }
    return weights
