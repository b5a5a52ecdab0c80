"""Decode steps taken three ways and compared byte for byte: eager, prepared, relaunched from the tape.

Every arm starts from the same poisoned memory and the same prompt and feeds the same tokens. After each step
the logits, the cached rows and all intermediate results are hashed; memory that no step may write is hashed
before and after. Equal arms show that replaying changes nothing. They do not show that a kernel is right,
since all arms run the same ones. This file knows no device and no model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from hipfire.base.errors import ContextLengthError, UnsupportedError, ValidationError
from hipfire.runtime.parity_steps import (
    Plan,
    Regions,
    feed,
    guard_rows,
    lengths,
    other_states,
    own_rows,
    own_states,
    prime,
)
from hipfire.runtime.route import Request, Retained, Route
from hipfire.runtime.runner import Runner

ARMS: Final[tuple[Request, ...]] = ("eager", "prepared", "relaunched")
SURFACES: Final = ("logits", "kv", "scratch")
# what recurrent layers keep, where a model has such
STATE: Final = "state"
# steps until a batch size is surely prepared: recorded, captured, replayed
_WARM_STEPS: Final = 3


@dataclass
class Surface:
    """What a memory held after each position: the bytes of one step, and a hash of each of its regions."""

    nbytes: int = 0
    steps: list[dict[str, str]] = field(default_factory=list)

    def add(self, regions: Regions) -> None:
        """Hash what the regions hold now."""
        self.nbytes, found = 0, {}
        for name, tensor in regions:
            data = _bytes_of(tensor)
            self.nbytes += data.numel()
            found[name] = hashlib.sha256(data.numpy().data).hexdigest()
        self.steps.append(found)

    def digest(self) -> str:
        """Return one SHA-256 of all positions."""
        digest = hashlib.sha256()
        for step in self.steps:
            for name, value in step.items():
                digest.update(f"{name}={value}\n".encode())
        return digest.hexdigest()


@dataclass
class Arm:
    """One way of running the steps, and what it left."""

    surfaces: dict[str, Surface]
    guard_before: str
    guard_after: str
    guard_nbytes: int
    route: Route


def capture(runner: Runner, plan: Plan) -> dict[str, Any]:
    """Record the step of a batch size anew, after prompts of `plan.context` tokens; return its identity.

    `launches`, `kernels` and `sequence_hash` are its key. `contracts` says how many kernels were looked at
    and what is wrong with them. Slots 0 to batch - 1 are overwritten. Raises UnsupportedError where steps are
    not recorded.
    """
    retained = _retained(runner, plan)
    retained.forget()
    prime(runner, retained, plan)
    retained.request = "prepared"
    feed(runner, plan, 0)
    facts = retained.facts(plan.batch)
    if facts is None:
        reason = retained.route().fallback_reason or "the step was not recorded"
        raise UnsupportedError(f"decode steps of this model are not recorded: {reason}")
    key = asdict(facts.key)
    return {
        **key,
        "context": plan.context,
        "contracts": {
            "kernels": key["kernels"],
            "faults": list(facts.faults),
            "undeclared": list(facts.undeclared),
            "libraries": list(facts.libraries),
        },
    }


def compare(runner: Runner, plan: Plan) -> dict[str, Any]:
    """Run the three arms and return the part of a replay report that says how they compare.

    Its `exact` is true only if every surface was seen in every arm and is equal in all, no guard changed, and
    each arm is proven to have taken its own way at every position. Slots are overwritten. Raises as
    `capture`.
    """
    retained = _retained(runner, plan)
    try:
        for _ in range(_WARM_STEPS):
            prime(runner, retained, plan)
            retained.request = "prepared"
            feed(runner, plan, 0)
        arms: dict[str, Arm] = {request: _run_arm(runner, retained, plan, request) for request in ARMS}
    finally:
        retained.request = "prepared"
    return _report(plan, arms)


def _report(plan: Plan, arms: Mapping[str, Arm]) -> dict[str, Any]:
    equal = {name: _equal(arms, name) for name in arms["eager"].surfaces}
    guard = {
        name: {
            "bytes": arm.guard_nbytes,
            "before": arm.guard_before,
            "after": arm.guard_after,
            "equal": arm.guard_nbytes > 0 and arm.guard_before == arm.guard_after,
        }
        for name, arm in arms.items()
    }
    wanted = {"eager": (0, 0), "prepared": (plan.positions, 0), "relaunched": (0, plan.positions)}
    proven = all(
        (arm.route.replays, arm.route.relaunches) == wanted[name] and arm.route.fallback_reason is None
        for name, arm in arms.items()
    )
    held = all(each["equal"] for each in guard.values())
    return {
        "plan": asdict(plan),
        "arms": {
            name: {
                surface: {"bytes": seen.nbytes, "hash": seen.digest()}
                for surface, seen in arm.surfaces.items()
            }
            for name, arm in arms.items()
        },
        "equal": equal,
        "first_divergence": _first_divergence(arms),
        "guard": guard,
        "route": {name: asdict(arm.route) for name, arm in arms.items()},
        "route_proven": proven,
        "exact": all(equal.values()) and held and proven,
    }


def _run_arm(runner: Runner, retained: Retained, plan: Plan, request: Request) -> Arm:
    """Run all positions of one arm from poisoned memory."""
    own, states = own_rows(runner, plan), own_states(runner, plan)
    beyond = [*guard_rows(runner, plan), *other_states(runner, plan)]
    caches = {tensor.untyped_storage().data_ptr() for _, tensor in (*own, *states, *beyond)}

    def scratch() -> list[tuple[str, torch.Tensor]]:
        found = retained.scratch(plan.batch)
        return [each for each in found if each[1].untyped_storage().data_ptr() not in caches]

    guards = retained.guards()
    kept = [tensor.clone() for _, tensor in guards]
    # afresh for each arm: what an earlier step wrote there must not hide the same write of a later one
    for _, tensor in (*own, *states, *beyond, *guards):
        _poison(tensor.view(torch.uint8))
    surfaces = {name: Surface() for name in (*SURFACES, *([STATE] if states else []))}
    guard = [*beyond, *guards]
    guard_before, nbytes = _hash_all(guard)
    prime(runner, retained, plan)
    retained.request = request
    before = retained.route()
    for index in range(plan.positions):
        # what a step leaves alone must not show what another one left there
        for _, tensor in scratch():
            _poison(tensor)
        logits = feed(runner, plan, index)
        surfaces["logits"].add([("logits", logits)])
        surfaces["kv"].add(own)
        surfaces["scratch"].add(scratch())
        if states:
            surfaces[STATE].add(states)
    guard_after, _ = _hash_all(guard)
    with torch.inference_mode():
        for (_, tensor), content in zip(guards, kept, strict=True):
            tensor.copy_(content)
    return Arm(surfaces, guard_before, guard_after, nbytes, _since(before, retained.route()))


def _equal(arms: Mapping[str, Arm], surface: str) -> bool:
    """Tell whether a surface was seen in all arms at all positions, and held the same bytes."""
    first, *others = (arm.surfaces[surface] for arm in arms.values())
    seen = first.nbytes > 0 and all(first.steps)
    return seen and all(other.nbytes == first.nbytes and other.steps == first.steps for other in others)


def _first_divergence(arms: Mapping[str, Arm]) -> dict[str, Any] | None:
    """Return the first position, surface and region where an arm left other bytes than the eager one."""
    eager = arms["eager"]
    for position in range(len(eager.surfaces["logits"].steps)):
        for surface in reversed(eager.surfaces):
            expected = eager.surfaces[surface].steps[position]
            for name, arm in arms.items():
                found = arm.surfaces[surface].steps[position]
                for region in expected | found:
                    if expected.get(region) != found.get(region):
                        return {"arm": name, "position": position, "surface": surface, "region": region}
    return None


def _since(before: Route, after: Route) -> Route:
    """Return a route whose counts are those of the steps between two routes."""
    return Route(
        requested=after.requested,
        selected=after.selected,
        replays=after.replays - before.replays,
        relaunches=after.relaunches - before.relaunches,
        sizes=after.sizes,
        fallback_reason=after.fallback_reason,
    )


def _retained(runner: Runner, plan: Plan) -> Retained:
    """Return what replays a runner's steps; refuse a plan that does not fit."""
    if runner.replay is None:
        raise UnsupportedError(
            "this model's steps run operation by operation: there is nothing to compare",
            hint="load it with weights packed for this device",
        )
    if plan.batch > runner.cache.slots:
        raise ValidationError(f"{plan.batch} sequences do not fit into {runner.cache.slots} slots")
    longest = lengths(plan)[-1] + plan.positions
    if longest > runner.cache.max_seq:
        raise ContextLengthError(longest, runner.cache.max_seq, hint="compare fewer positions")
    return runner.replay


def _poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with what torch calls uninitialized: NaN, or the largest number of its type."""
    with torch.inference_mode():
        floating = tensor.dtype.is_floating_point
        tensor.fill_(math.nan if floating else torch.iinfo(tensor.dtype).max)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in this machine's memory, uint8 [n]."""
    return tensor.detach().contiguous().view(torch.uint8).flatten().cpu()


def _hash_all(regions: Sequence[tuple[str, torch.Tensor]]) -> tuple[str, int]:
    """Return one SHA-256 of all regions, and their bytes."""
    digest, count = hashlib.sha256(), 0
    for name, tensor in regions:
        data = _bytes_of(tensor)
        digest.update(name.encode())
        digest.update(data.numpy().data)
        count += data.numel()
    return digest.hexdigest(), count
