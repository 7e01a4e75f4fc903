"""Tiny random-weight Hugging Face MoE models: the classes of the published models, a few kilobytes.

`build("mixtral", "grouped_mm")` gives the model, `prefill` and `decode` give its inputs. Sizes are
the same in all families unless a family needs others: H 64, I 32, E 8, K 2, two layers, vocabulary
128.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

VOCAB = 128
HIDDEN = 64
INTERMEDIATE = 32
NUM_EXPERTS = 8
TOP_K = 2

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
PHASES = ("prefill", "decode_dynamic_cache", "decode_static_cache")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
_QWEN: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
}
_QWEN_SHARED: dict[str, Any] = {**_QWEN, "shared_expert_intermediate_size": 48}
_LOCAL: dict[str, Any] = {
    "intermediate_size": INTERMEDIATE,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: name in transformers' configuration mapping.
        config: keyword arguments of the configuration.
        blocks: qualified names of the MoE blocks.
        implementations: what `experts_implementation` may be; ("",) for families outside of that
            interface.
        model_class: `module:Class` when `AutoModelForCausalLM` does not know the family.
        attention: attention implementation.
        unrolled: a layer is a Python loop over the tokens, so no symbol for their count is exported.
    """

    model_type: str
    config: Mapping[str, Any]
    blocks: tuple[str, ...]
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    model_class: str = ""
    attention: str = "sdpa"
    unrolled: bool = False


def _family(model_type: str, *parts: Mapping[str, Any], block: str = "mlp", **more: Any) -> Family:
    config: dict[str, Any] = dict(_COMMON)
    for part in parts:
        config.update(part)
    blocks = more.pop("blocks", None) or tuple(f"model.layers.{i}.{block}" for i in range(2))
    return Family(model_type=model_type, config=config, blocks=blocks, **more)


FAMILIES: dict[str, Family] = {
    "mixtral": _family("mixtral", _LOCAL, {"sliding_window": None}),
    "qwen2_moe": _family("qwen2_moe", _QWEN_SHARED),
    "qwen3_moe": _family("qwen3_moe", _QWEN, {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_next": _family("qwen3_next", _QWEN_SHARED, _LINEAR_ATTENTION, {"head_dim": 16}),
    "qwen3_5_moe_text": _family(
        "qwen3_5_moe_text", _QWEN_SHARED, _LINEAR_ATTENTION, {"head_dim": 16}
    ),
    "deepseek_v2": _family(
        "deepseek_v2",
        _DEEPSEEK,
        _MLA,
        {
            "q_lora_rank": None,
            # with K <= topk_group the group limit would change nothing
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": _family("deepseek_v3", _DEEPSEEK, _MLA, {"n_group": 4, "topk_group": 2}),
    "olmoe": _family("olmoe", {**_QWEN, "intermediate_size": INTERMEDIATE}),
    "phimoe": _family("phimoe", _LOCAL, {"sliding_window": None}),
    "gpt_oss": _family(
        "gpt_oss",
        _LOCAL,
        {
            "head_dim": 16,
            "sliding_window": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
        attention="eager",
    ),
    "llama4_text": _family(
        "llama4_text",
        _LOCAL,
        {
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
        },
        block="feed_forward",
        implementations=("",),
    ),
    "glm4_moe": _family("glm4_moe", _DEEPSEEK, {"head_dim": 16, "n_group": 1, "topk_group": 1}),
    "granitemoe": _family("granitemoe", _LOCAL, block="block_sparse_moe"),
    "jamba": _family(
        "jamba",
        {**_QWEN, "intermediate_size": INTERMEDIATE},
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
        },
        block="feed_forward",
        unrolled=True,
    ),
    "ernie4_5_moe": _family(
        "ernie4_5_moe",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": INTERMEDIATE,
            "moe_num_experts": NUM_EXPERTS,
            "moe_k": TOP_K,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 1,
        },
    ),
    "minimax_m2": _family("minimax_m2", _LOCAL, {"head_dim": 16, "rotary_dim": 16}),
    "lfm2_moe": _family(
        "lfm2_moe",
        _QWEN,
        {"num_dense_layers": 0, "layer_types": ["full_attention", "full_attention"]},
        block="feed_forward",
    ),
    "hunyuan_v1_moe": _family(
        "hunyuan_v1_moe",
        {
            "intermediate_size": INTERMEDIATE,
            "num_experts": NUM_EXPERTS,
            "moe_topk": TOP_K,
            "head_dim": 16,
        },
    ),
    "nemotron_h": _family(
        "nemotron_h",
        _DEEPSEEK,
        {
            "moe_shared_expert_intermediate_size": 48,
            "layers_block_type": ["attention", "moe", "moe"],
            "hybrid_override_pattern": None,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
        },
        blocks=("model.layers.1.mixer", "model.layers.2.mixer"),
    ),
    "flex_olmo": _family("flex_olmo", {**_QWEN, "intermediate_size": INTERMEDIATE}),
    "dbrx": Family(
        model_type="dbrx",
        config={
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": INTERMEDIATE,
                "moe_num_experts": NUM_EXPERTS,
                "moe_top_k": TOP_K,
                "hidden_size": HIDDEN,
            },
        },
        blocks=("transformer.blocks.0.ffn", "transformer.blocks.1.ffn"),
        implementations=("",),
    ),
    "jetmoe": Family(
        model_type="jetmoe",
        config={
            **_COMMON,
            **_LOCAL,
            "kv_channels": 16,
        },
        blocks=("model.layers.0.mlp", "model.layers.1.mlp"),
        implementations=("",),
        attention="",
    ),
}

MAIN = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "deepseek_v2",
    "deepseek_v3",
    "olmoe",
    "phimoe",
    "gpt_oss",
    "llama4_text",
    "glm4_moe",
    "granitemoe",
    "jamba",
    "ernie4_5_moe",
    "minimax_m2",
)
EXTRA = tuple(name for name in FAMILIES if name not in MAIN)

# Parameters and buffers that keep their initial values: a random one would make the layer
# numerically meaningless.
_KEEP = ("norm", "inv_freq", "rot", "A_log", "dt_")


def config_of(name: str, **overrides: Any) -> Any:
    """The configuration object of a family."""
    from transformers import CONFIG_MAPPING

    family = FAMILIES[name]
    return CONFIG_MAPPING[family.model_type](**{**family.config, **overrides})


def build(
    name: str,
    implementation: str = "grouped_mm",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> nn.Module:
    """A tiny model of a family in eval mode; every weight and router bias is random, non-zero.

    Args:
        name: key of `FAMILIES`.
        implementation: `experts_implementation`; "" leaves the family's default.
        dtype: dtype of the parameters.
        seed: seed of the weights.
        overrides: configuration values.
    """
    from transformers import AutoModelForCausalLM

    family = FAMILIES[name]
    config = config_of(name, **overrides)
    options: dict[str, Any] = {"dtype": dtype}
    if family.attention:
        options["attn_implementation"] = family.attention
    if implementation and "" not in family.implementations:
        options["experts_implementation"] = implementation
    torch.manual_seed(seed)
    if family.model_class:
        module, _, cls = family.model_class.partition(":")
        model = getattr(importlib.import_module(module), cls)._from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_config(config, **options)
    randomize(model, seed)
    return model.eval()


def randomize(model: nn.Module, seed: int) -> None:
    """Fill parameters and floating-point buffers with seeded values, leaving `_KEEP` as it is."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or tensor.ndim == 0 or any(k in key for k in _KEEP):
                continue
            scale = 0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)


def _cache_argument(model: nn.Module) -> str:
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def token_ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids [batch, length] int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def prefill(batch: int = 2, length: int = 17, seed: int = 1) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of a prefill without a cache."""
    return (token_ids(batch, length, seed),), {"use_cache": False}


def decode(
    model: nn.Module, cache: str = "dynamic", batch: int = 2, length: int = 7, seed: int = 1
) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a one-token step on a newly filled cache, "dynamic" or "static"."""
    ids = token_ids(batch, length + 1, seed)
    name = _cache_argument(model)
    with torch.no_grad():
        if cache == "static":
            from transformers import StaticCache

            store = StaticCache(config=model.config, max_cache_len=32)
            model(ids[:, :length], use_cache=True, **{name: store})
        else:
            output = model(ids[:, :length], use_cache=True)
            store = getattr(output, "cache", None) or output.past_key_values
    return (ids[:, length:],), {"use_cache": True, name: store}


def inputs(model: nn.Module, phase: str, length: int = 17) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a phase of `PHASES`; `length` is that of a prefill."""
    if phase == "prefill":
        return prefill(length=length)
    return decode(model, "static" if phase == "decode_static_cache" else "dynamic")
