"""Which tensor gets which format: one table of recipes, one table of roles.

Decisions follow the newest generation of the original where generations differ; docs/formats.md lists the
choices. A decision depends on a tensor's canonical name and shape, and on whether the model is a mixture of
experts, so the plan is complete before any work.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from hipfire.base.errors import ValidationError
from hipfire.base.qtypes import QType

Role = Literal["embedding", "rates", "small", "router", "mixer", "matrix"]

# matrices with fewer weights than this stay in half precision
SMALLEST_MATRIX = 32
ROTATION = 256

# which experts a token takes hangs on small differences
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
# what every token passes in a mixture of experts, where it is a small part of the weights
MIXERS = ("self_attn.", "linear_attn.", "lm_head.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A `--format`: the formats of matrices whose rows divide into 256, of ragged ones, and of embeddings.

    What embeddings have is also the format of routers, and of all but the experts in a mixture of experts.
    """

    name: str
    aliases: tuple[str, ...]
    matrix: QType
    ragged: QType
    embedding: QType
    summary: str

    def qtype(self, name: str, shape: tuple[int, ...], *, mixture: bool = False) -> QType:
        """Return the format of a tensor, by canonical name and [out, in] shape.

        `mixture` tells that it belongs to a mixture of experts.
        """
        kind = role(name, shape)
        if kind == "rates":
            return QType.F32
        if kind == "small":
            return QType.F16
        if kind in ("embedding", "router") or (kind == "mixer" and mixture):
            return self.embedding
        return self.matrix if shape[-1] % ROTATION == 0 else self.ragged


Q = QType
RECIPES = (
    Recipe("mq4", ("mq4v2", "mq4g256v2"), Q.MQ4G256V2, Q.HFQ4G128, Q.Q8F16, "4 bit, rotated, two scales"),
    Recipe("mq4v1", ("mq4g256", "magnum"), Q.MQ4G256, Q.HFQ4G128, Q.Q8F16, "4 bit, rotated"),
    Recipe("hf4", ("hfq4", "hfq4g256"), Q.HFQ4G256, Q.HFQ4G128, Q.Q8F16, "4 bit, not rotated"),
    Recipe("mq6", ("mq6g256",), Q.MQ6G256, Q.Q8F16, Q.Q8F16, "6 bit, rotated"),
    Recipe("mq6v2", ("mq6g256v2",), Q.MQ6G256V2, Q.Q8F16, Q.Q8F16, "6 bit, rotated, two scales"),
    Recipe("hf6", ("hfq6", "hfq6g256"), Q.HFQ6G256, Q.Q8F16, Q.Q8F16, "6 bit, not rotated"),
    Recipe("q8", ("q8f16",), Q.Q8F16, Q.Q8F16, Q.Q8F16, "8 bit"),
    Recipe("f16", ("fp16",), Q.F16, Q.F16, Q.F16, "half precision, not quantized"),
)


def role(name: str, shape: tuple[int, ...]) -> Role:
    """Return what a tensor is used for, as far as its format depends on it."""
    if name.startswith("rope_freqs") or name.endswith("A_log"):
        # half precision would shift every frequency, and every rate of decay, by up to a thousandth
        return "rates"
    elements = 1
    for size in shape:
        elements *= size
    is_weight = "weight" in name and "norm" not in name and "bias" not in name
    # the filter of a convolution has a few weights in a channel: blocks of a format would span channels
    if len(shape) < 2 or not is_weight or elements < SMALLEST_MATRIX or name.endswith("conv1d.weight"):
        return "small"
    if "embed_tokens" in name:
        return "embedding"
    if name.endswith(ROUTERS):
        return "router"
    return "mixer" if any(part in name for part in MIXERS) else "matrix"


def recipe(name: str) -> Recipe:
    """Return the recipe of a format name or alias; ValidationError lists the names otherwise."""
    wanted = name.lower()
    for candidate in RECIPES:
        if wanted == candidate.name or wanted in candidate.aliases:
            return candidate
    names = [candidate.name for candidate in RECIPES]
    close = difflib.get_close_matches(wanted, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
    raise ValidationError(f"unknown format {name!r}", hint=hint)
