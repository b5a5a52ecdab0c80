"""How GGUF files store tiny hybrid models, stated apart from the code under test."""

from __future__ import annotations

from typing import Any

import gguf
import torch

FIELDS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
NAMES = {
    "linear_attn.in_proj_qkv": "attn_qkv.weight", "linear_attn.in_proj_z": "attn_gate.weight",
    "linear_attn.in_proj_b": "ssm_beta.weight", "linear_attn.in_proj_a": "ssm_alpha.weight",
    "linear_attn.conv1d": "ssm_conv1d.weight", "linear_attn.norm": "ssm_norm.weight",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.out_proj": "ssm_out.weight", "post_attention_layernorm": "post_attention_norm.weight",
}  # fmt: skip


def _offset(name: str) -> float:
    return 1.0 if "norm" in name and "linear_attn" not in name else 0.0


def _value_rows(config: Any, name: str) -> tuple[int, int] | None:
    """Return from which row on a tensor's rows belong to value heads, and how many each has."""
    size = config.linear_value_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        return 2 * config.linear_num_key_heads * config.linear_key_head_dim, size
    if "in_proj_z" in name:
        return 0, size
    return (0, 1) if any(part in name for part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias")) else None


def _moved(values: torch.Tensor, first: int, size: int, outer: int, inner: int) -> torch.Tensor:
    """Return rows from `first` on, outer x inner blocks of `size`, in the order inner x outer."""
    blocks = values[first:].reshape(outer, inner, size, *values.shape[1:]).transpose(0, 1)
    return torch.cat((values[:first], blocks.reshape(values[first:].shape)))


def stored(config: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor as GGUF files have it: the heads of values are counted across the key heads."""
    keys = config.linear_num_key_heads
    group = config.linear_num_value_heads // keys
    if "conv1d" in name:
        values = values.squeeze(1)
    if "A_log" in name:
        values = -values.exp()
    rows = _value_rows(config, name)
    if rows is not None:
        values = _moved(values, *rows, keys, group)
    if "out_proj" in name:
        values = _moved(values.T, 0, config.linear_value_head_dim, keys, group).T
    return (values + _offset(name)).contiguous()


def restored(config: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return what `stored` was given."""
    keys = config.linear_num_key_heads
    group = config.linear_num_value_heads // keys
    rows = _value_rows(config, name)
    if rows is not None:
        values = _moved(values, *rows, group, keys)
    if "out_proj" in name:
        values = _moved(values.T, 0, config.linear_value_head_dim, group, keys).T
    if "A_log" in name:
        values = (-values).log()
    if "conv1d" in name:
        values = values.unsqueeze(1)
    return values - _offset(name)


def write_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the metadata that only these models have."""
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    interval = config.layer_types.index("full_attention") + 1
    writer.add_uint32(f"{writer.arch}.full_attention_interval", interval)
