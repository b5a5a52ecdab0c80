"""All cases of all operations that the CPU engine implements, by the operation's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import attention_cases as attention
import composite_cases as composite
import delta_cases as delta
import expert_cases as experts
import panel_kit
import row_cases as rows
from cpu_kit import Case

from hipfire.kernels.cpu.layouts import LAYOUTS

# one layout for each way in which codes, scales and groups are treated; the paths are compared with these
SOME_LAYOUTS = ("u4g32", "o6g16", "i8g32", "u4g256")


def op_cases(layouts: tuple[str, ...] = tuple(LAYOUTS)) -> Mapping[str, Callable[[], Iterator[Case]]]:
    """Return the cases of each operation; those of packed weights for the given layouts only."""
    return {
        "add": rows.add_cases,
        "silu_mul": rows.silu_cases,
        "gelu_tanh_mul": rows.gelu_cases,
        "mul_sigmoid": rows.mul_sigmoid_cases,
        "scale": rows.scale_cases,
        "softcap": rows.softcap_cases,
        "rms_norm": rows.rms_norm_cases,
        "residual_norm": composite.residual_norm_cases,
        "rope_angles": rows.angle_cases,
        "rope": rows.rope_cases,
        "fwht": rows.fwht_cases,
        "inverse_fwht": rows.inverse_fwht_cases,
        "kv_write": partial(_of_modes, attention.write_cases, ("f32", "bf16")),
        "kv_write_q8": partial(attention.write_cases, "q8"),
        "attention_input": partial(_of_modes, composite.attention_input_cases, ("f32", "bf16")),
        "attention_input_q8": partial(composite.attention_input_cases, "q8"),
        "attention": partial(_of_modes, attention.attention_cases, ("f32", "bf16")),
        "attention_q8": partial(attention.attention_cases, "q8"),
        "panel_linear": partial(panel_kit.linear_cases, layouts),
        "panel_select": partial(panel_kit.select_cases, layouts),
        "delta_net": delta.delta_net_cases,
        "route": experts.route_cases,
        "add_gated": experts.add_gated_cases,
        "expert_gated": partial(experts.gated_cases, layouts),
        "expert_down": partial(experts.down_cases, layouts),
    }


def _of_modes(cases: Callable[[str], Iterator[Case]], modes: tuple[str, ...]) -> Iterator[Case]:
    for mode in modes:
        yield from cases(mode)
