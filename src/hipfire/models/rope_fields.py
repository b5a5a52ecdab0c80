"""The rotary embedding as checkpoints state it: Hugging Face objects of two generations, and GGUF keys."""

from __future__ import annotations

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.layers.rope import RopeSpec
from hipfire.models.fields import Fields, GgufFields


def hf_rope(fields: Fields, dims: int, theta: float = 10000.0) -> RopeSpec:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`; `theta` is the default base."""
    theta = fields.number("rope_theta", theta)
    nested = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    return RopeSpec(dims, theta) if nested is None else rope_object(nested, dims, theta)


def rope_object(fields: Fields, dims: int, theta: float) -> RopeSpec:
    """Read one object of rope parameters; UnsupportedError for a kind that is not implemented."""
    theta = fields.number("rope_theta", theta)
    fields.require("partial_rotary_factor", (1.0,), 1.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeSpec(dims, theta)
    if kind == "linear":
        return RopeSpec(dims, theta, "linear", fields.number("factor"))
    if kind != "llama3":
        raise UnsupportedError(
            f"rope scaling {kind!r} is not supported", hint="known: default, linear, llama3"
        )
    spec = RopeSpec(
        dims,
        theta,
        "llama3",
        fields.number("factor"),
        fields.number("low_freq_factor"),
        fields.number("high_freq_factor"),
        fields.integer("original_max_position_embeddings"),
    )
    if spec.high_factor <= spec.low_factor:
        raise ArtifactError(
            f"is {spec.high_factor}, not above low_freq_factor {spec.low_factor}",
            field=fields.name("high_freq_factor"),
        )
    return spec


def gguf_rope(fields: GgufFields, dims: int, theta: float) -> RopeSpec:
    """Read a GGUF file's rope keys; a scaling factor without a type means linear, as the older key does."""
    theta = fields.number("rope.freq_base", theta)
    kind = fields.get("rope.scaling.type")
    if kind == "none":
        return RopeSpec(dims, theta)
    if kind not in (None, "linear"):
        raise UnsupportedError(f"rope scaling {kind!r} is not supported", hint="known: none, linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    return RopeSpec(dims, theta) if factor == 1.0 else RopeSpec(dims, theta, "linear", factor)
