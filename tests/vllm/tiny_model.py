"""Small models with random weights that make attention matter.

vLLM's own dummy weights are so small that the next token hardly depends on the KV cache: a load that
copied nothing would go unnoticed. Here queries and keys are large enough for attention to pick single
tokens, and values large enough to decide what comes next.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 2048
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD = 256, 512, 8, 4, 32
_COMMON = {
    "hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_attention_heads": _HEADS, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip


def write_model(directory: Path, kind: str = "llama", *, layers: int = 4, seed: int = 1) -> str:
    """Write config and weights; return the directory as a model name.

    ``kind`` is "llama", "gemma" (every third layer has full attention, the others a window of 64 tokens),
    "mla" (DeepSeek's latents) or "lfm" (every second layer is a convolution with a state).
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, shapes = {"llama": _llama, "gemma": _gemma, "mla": _mla, "lfm": _lfm}[kind](layers)
    (directory / "config.json").write_text(json.dumps(_COMMON | {"num_hidden_layers": layers} | config))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _norm(name, shape, kind) if len(shape) == 1 else _matrix(name, shape, generator, kind)
        for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def _norm(name: str, shape: tuple[int, ...], kind: str) -> torch.Tensor:
    if kind == "gemma":  # It adds one.
        return torch.zeros(shape)
    return torch.full(shape, 4.0 if "q_layernorm" in name else 1.0)


def _matrix(name: str, shape: tuple[int, ...], generator: torch.Generator, kind: str) -> torch.Tensor:
    gain = 2.0 if "v_proj" in name or "o_proj" in name or "out_proj" in name else 1.5 if "attn" in name else 1.0
    spread = gain * float(shape[-1]) ** -0.5
    if "embed" in name:
        # Tied to the output, a large embedding would repeat the last token, whatever attention says.
        spread = 0.01 if kind == "gemma" else 1.0
    return torch.randn(*shape, generator=generator).mul(spread)


Shapes = dict[str, tuple[int, ...]]


def _llama(layers: int) -> tuple[dict[str, Any], Shapes]:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
    }  # fmt: skip
    return config, _shapes(layers, _attention())


def _gemma(layers: int) -> tuple[dict[str, Any], Shapes]:
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD, "sliding_window": 64, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 8,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "layer_types": ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(layers)],
    }  # fmt: skip
    norms: Shapes = {"self_attn.q_norm": (_HEAD,), "self_attn.k_norm": (_HEAD,)}
    norms |= {"pre_feedforward_layernorm": (_HIDDEN,), "post_feedforward_layernorm": (_HIDDEN,)}
    shapes = _shapes(layers, _attention() | norms)
    del shapes["lm_head.weight"]
    return config, shapes


def _mla(layers: int) -> tuple[dict[str, Any], Shapes]:
    latent, rope, plain, value = 512, 64, 128, 128
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": _HEADS,
        "q_lora_rank": None, "kv_lora_rank": latent, "qk_nope_head_dim": plain, "qk_rope_head_dim": rope,
        "v_head_dim": value, "first_k_dense_replace": layers, "moe_intermediate_size": 128, "n_shared_experts": 1,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    }  # fmt: skip
    attention: Shapes = {
        "self_attn.q_proj": (_HEADS * (plain + rope), _HIDDEN),
        "self_attn.kv_a_proj_with_mqa": (latent + rope, _HIDDEN),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (_HEADS * (plain + value), latent),
        "self_attn.o_proj": (_HIDDEN, _HEADS * value),
    }
    return config, _shapes(layers, attention)


def _lfm(layers: int) -> tuple[dict[str, Any], Shapes]:
    kernel = 4
    config = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_key_value_heads": _KV_HEADS,
        "block_dim": _HIDDEN, "block_ff_dim": _INNER, "block_auto_adjust_ff_dim": False, "block_multiple_of": 64,
        "conv_dim": _HIDDEN, "conv_dim_out": _HIDDEN, "conv_L_cache": kernel, "conv_bias": False, "norm_eps": 1e-6,
        "tie_embedding": False,
        "layer_types": ["full_attention" if layer % 2 else "conv" for layer in range(layers)],
    }  # fmt: skip
    convolution: Shapes = {
        "conv.conv": (_HIDDEN, 1, kernel),
        "conv.in_proj": (3 * _HIDDEN, _HIDDEN),
        "conv.out_proj": (_HIDDEN, _HIDDEN),
    }
    attention: Shapes = {name.replace("o_proj", "out_proj"): shape for name, shape in _attention().items()}
    attention |= {"self_attn.q_layernorm": (_HEAD,), "self_attn.k_layernorm": (_HEAD,)}
    common: Shapes = {
        "operator_norm": (_HIDDEN,),
        "ffn_norm": (_HIDDEN,),
        "feed_forward.w1": (_INNER, _HIDDEN),
        "feed_forward.w3": (_INNER, _HIDDEN),
        "feed_forward.w2": (_HIDDEN, _INNER),
    }
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, _HIDDEN),
        "model.embedding_norm.weight": (_HIDDEN,),
        "lm_head.weight": (VOCABULARY, _HIDDEN),
    }
    for layer in range(layers):
        of_the_layer = common | (attention if layer % 2 else convolution)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_the_layer.items()}
    return config, shapes


def _attention() -> Shapes:
    return {
        "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
    }


def _shapes(layers: int, of_a_layer: Shapes) -> Shapes:
    of_a_layer = of_a_layer | {
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (VOCABULARY, _HIDDEN),
    }
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_a_layer.items()}
    return shapes
