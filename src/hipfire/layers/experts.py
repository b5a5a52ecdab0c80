"""The feed-forward block of a mixture of experts: every token takes those that a router chooses for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from hipfire.base.errors import UnsupportedError
from hipfire.kernels.experts import ADD_GATED, EXPERT_DOWN, EXPERT_GATED, ROUTE, ROUTE_PACKED
from hipfire.layers.context import StepContext
from hipfire.layers.linear import JoinedLinear
from hipfire.layers.mlp import GATED_ACTIVATIONS, GatedMlp, mlp_tensors
from hipfire.layers.weights import ExpertTensors, WeightSource

ROUTER = "gate.weight"
SHARED_GATE = "shared_expert_gate.weight"
SHARED = "shared_expert"
_SHARED_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of the block: `experts` of width `intermediate`, of which each token takes `chosen`.

    `shared` is the width of an expert that every token takes besides, weighted by a gate of its own; 0 for
    none. With `normalize` the weights of the chosen experts are divided by their sum.
    """

    hidden: int
    experts: int
    chosen: int
    intermediate: int
    shared: int
    normalize: bool = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the tensor names and shapes of one layer's block."""
        stacks: dict[str, tuple[int, ...]] = {
            f"mlp.{ROUTER}": (self.experts, self.hidden),
            "mlp.experts.gate_up_proj": (self.experts, 2 * self.intermediate, self.hidden),
            "mlp.experts.down_proj": (self.experts, self.hidden, self.intermediate),
        }
        if not self.shared:
            return stacks
        shared = mlp_tensors(self.hidden, self.shared)
        named = {name.replace("mlp.", f"mlp.{SHARED}.", 1): shape for name, shape in shared.items()}
        return {**stacks, **named, f"mlp.{SHARED_GATE}": (1, self.hidden)}


class ExpertMlp:
    """Router, experts and shared expert of one layer; x and result [T, hidden].

    A shared expert that is kept like the others is run as one of them, which every token chooses.
    """

    def __init__(self, weights: WeightSource, prefix: str, shape: ExpertShape, activation: str) -> None:
        if activation not in GATED_ACTIVATIONS:
            raise UnsupportedError(
                f"activation {activation!r} is not supported", hint=f"known: {', '.join(GATED_ACTIVATIONS)}"
            )
        self.shape = shape
        self.activation = activation
        routes = [(f"{prefix}.{ROUTER}", shape.experts)]
        if shape.shared:
            routes.append((f"{prefix}.{SHARED_GATE}", 1))
        self.router = JoinedLinear(weights.joined(routes, shape.hidden))
        sizes = (shape.experts, 2 * shape.intermediate, shape.hidden)
        turned = (shape.experts, shape.hidden, shape.intermediate)
        alike = shape.shared == shape.intermediate
        gate, up, down = ((f"{prefix}.{SHARED}.{name}.weight",) if alike else () for name in _SHARED_NAMES)
        projections = (
            ExpertTensors(f"{prefix}.experts.gate_up_proj", *sizes, sections=2, shared=gate + up),
            ExpertTensors(f"{prefix}.experts.down_proj", *turned, shared=down),
        )
        self.inputs, self.down = weights.experts(projections)
        apart = shape.shared > 0 and not self.inputs.shared
        self.shared = (
            GatedMlp(weights, f"{prefix}.{SHARED}", shape.hidden, shape.shared, activation) if apart else None
        )

    @property
    def rotated(self) -> bool:
        """Tell whether weights of a rotated format read the block's input."""
        shared = self.shared is not None and self.shared.rotated
        return self.inputs.rotated or self.router.rotated or shared

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the block's output before the residual sum."""
        run = step.launcher.run
        ids, weights, gate = self._routed(x, step)
        read = step.rotated(x) if self.inputs.rotated else x
        # here, where the step still has the rotation of x
        apart = None if self.shared is None else self.shared(x, step)
        gated = (read, ids, self.inputs.stack, self.activation)
        hidden = run(EXPERT_GATED, *gated, rotated=self.down.rotated)
        out = cast(torch.Tensor, run(EXPERT_DOWN, hidden, ids, weights, self.down.stack))
        return out if apart is None else cast(torch.Tensor, run(ADD_GATED, out, apart, gate))

    def _routed(
        self, x: torch.Tensor, step: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return each token's experts and their weights, and the gate of a shared expert that is apart."""
        run, shape, matrix = step.launcher.run, self.shape, self.router.joined.matrix
        how = (shape.chosen, shape.normalize)
        if matrix is not None and self.shared is None:
            return *run(ROUTE_PACKED, self.router.basis(x, step), matrix, shape.experts, *how), None
        logits, *gates = self.router(x, step)
        gate = gates[0] if gates else None
        return *run(ROUTE, logits, *how, gate if self.inputs.shared else None), gate
