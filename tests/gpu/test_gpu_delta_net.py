"""Gated DeltaNet on the GPU path: kernels against a recurrence in float64, decoded and in chunks.

States of slots that a step does not name are NaN, and so are those of sequences that begin. Real head sizes
and long prompts only where a GPU is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gpu_kit import DEVICE, Poisoned, engine, relative_rms

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.delta_chunks import unit_inverse
from hipfire.kernels.gpu.delta_net import delta_net
from hipfire.kernels.gpu.delta_step import log_decay
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.gpu.target import INTERPRETED

# mixed, z, b, a
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
EPS = 1e-6
# of float32, and of bfloat16 where the chunks of a prompt are; the interpreter has float32 there too
EXACT = 1e-5
CHUNKED = EXACT if INTERPRETED else 5e-3
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="takes too long without a GPU")


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer."""

    keys: int = 2
    values: int = 4
    dk: int = 16
    dv: int = 16
    width: int = 4
    tiled: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.dk + self.values * self.dv


def cut(inputs: Inputs, first: int, stop: int) -> Inputs:
    """Return the inputs of some tokens."""
    mixed, z, b, a = (each[first:stop] for each in inputs)
    return mixed, z, b, a


class Layer:
    """A layer with random weights and the states of some slots."""

    def __init__(self, heads: Heads, slots: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.heads, self.dtype = heads, dtype
        self.conv = torch.randn(heads.channels, heads.width, device=DEVICE) * 0.5
        self.decay = -torch.rand(heads.values, device=DEVICE) * 2 - 0.01
        self.bias = torch.randn(heads.values, device=DEVICE)
        self.norm = 1 + 0.1 * torch.randn(heads.dv, device=DEVICE)
        tail = heads.channels * (heads.width - 1)
        matrix = heads.values * heads.dk * heads.dv
        # two layers in one buffer: the second is used
        self.memory = torch.full((slots, 2 * (tail + matrix)), float("nan"), device=DEVICE)
        self.tail = self.memory[:, tail + matrix : 2 * tail + matrix].view(slots, heads.channels, -1)
        self.matrix = self.memory[:, 2 * tail + matrix :].view(slots, heads.values, heads.dk, heads.dv)

    def begin(self, slot: int) -> None:
        """Let a slot's sequence have come some way."""
        self.tail[slot] = torch.randn_like(self.tail[slot])
        self.matrix[slot] = torch.randn_like(self.matrix[slot]) * 0.3

    def inputs(self, tokens: int) -> Inputs:
        """Return random inputs, columns of one wide product."""
        heads = self.heads
        wide = heads.channels + heads.values * heads.dv + 2 * heads.values
        joined = torch.randn(tokens, wide, device=DEVICE).to(self.dtype)
        widths = [heads.channels, heads.values * heads.dv, heads.values, heads.values]
        mixed, z, b, a = torch.split(joined, widths, dim=1)
        return mixed, z, b, a

    def run(
        self,
        inputs: Inputs,
        pieces: list[tuple[int, int, int]],
        *,
        exact: bool = False,
        single: bool = False,
    ) -> torch.Tensor:
        """Run the kernels on pieces (slot, position, tokens) and return the result."""
        rows = [(slot, start + i) for slot, start, count in pieces for i in range(count)]
        firsts = [sum(count for _, _, count in pieces[:index]) for index in range(len(pieces))]
        table = [(first, count) for first, (_, _, count) in zip(firsts, pieces, strict=True)]
        scratch = Poisoned()
        result = delta_net(
            engine("float" if exact else "int8", scratch),
            *inputs,
            self.conv,
            self.decay,
            self.bias,
            self.norm,
            self.tail,
            self.matrix,
            torch.tensor(rows, dtype=torch.int64, device=DEVICE),
            None if single else torch.tensor(table, dtype=torch.int32, device=DEVICE),
            EPS,
            tiled=self.heads.tiled,
        )
        scratch.check_guards()
        return result

    def wanted(
        self, inputs: Inputs, pieces: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return result, tails and matrices of the recurrence in float64, by slot for the states."""
        tails, matrices = self.tail.double(), self.matrix.double()
        mixed, z, b, a = (each.double() for each in inputs)
        out, first = [], 0
        for slot, start, count in pieces:
            if start == 0:
                tails[slot], matrices[slot] = 0, 0
            for token in range(first, first + count):
                history = torch.cat((tails[slot], mixed[token][:, None]), 1)
                tails[slot] = history[:, 1:]
                x = torch.nn.functional.silu((history * self.conv.double()).sum(1))
                out.append(self._token(x, z[token], b[token], a[token], matrices[slot]))
            first += count
        return torch.stack(out).flatten(1), tails, matrices

    def _token(
        self, x: torch.Tensor, z: torch.Tensor, b: torch.Tensor, a: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """Move a state [Hv, Dk, Dv] on and return what its token sees [Hv, Dv]."""
        heads = self.heads
        widths = [heads.keys * heads.dk] * 2 + [heads.values * heads.dv]
        q, k, v = torch.split(x, widths)
        q, k = (each.view(heads.keys, heads.dk) for each in (q, k))
        q, k = (each * (each.square().sum(1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
        head, group = torch.arange(heads.values, device=DEVICE), heads.values // heads.keys
        read = head % heads.keys if heads.tiled else head // group
        q, k = q[read] * heads.dk**-0.5, k[read]
        decay = (self.decay.double() * torch.nn.functional.softplus(a + self.bias.double())).exp()
        state *= decay[:, None, None]
        change = b.sigmoid()[:, None] * (v.view(heads.values, -1) - torch.einsum("hk,hkv->hv", k, state))
        state += k[:, :, None] * change[:, None, :]
        out = torch.einsum("hk,hkv->hv", q, state)
        out = out * (out.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm.double()
        return out * torch.nn.functional.silu(z.view(heads.values, -1))

    def check(
        self,
        pieces: list[tuple[int, int, int]],
        accuracy: float,
        *,
        exact: bool = False,
        single: bool = False,
    ) -> torch.Tensor:
        """Compare result and states of a step; what belongs to no piece must be as before."""
        inputs = self.inputs(sum(count for _, _, count in pieces))
        wanted, tails, matrices = self.wanted(inputs, pieces)
        before = self.memory.clone()
        result = self.run(inputs, pieces, exact=exact, single=single)
        assert relative_rms(result, wanted) < accuracy
        for slot, _, _ in pieces:
            assert relative_rms(self.matrix[slot], matrices[slot]) < accuracy
            assert torch.equal(self.tail[slot], tails[slot].float())
        named = {slot for slot, _, _ in pieces}
        half = self.memory.shape[1] // 2
        for slot in range(self.memory.shape[0]):
            stop = half if slot in named else None
            assert torch.equal(
                self.memory[slot, :stop].view(torch.int32), before[slot, :stop].view(torch.int32)
            )
        return result


@pytest.mark.parametrize(
    "heads", [Heads(), Heads(1, 3, 32, 16), Heads(2, 2, 8, 24, width=3), Heads(tiled=True)]
)
def test_decode_steps_equal_the_recurrence(heads: Heads) -> None:
    layer = Layer(heads, 5)
    layer.begin(3)
    positions = {1: 0, 3: 7, 0: 0}
    for _ in range(4):
        layer.check([(slot, at, 1) for slot, at in positions.items()], 2e-6, single=True)
        positions = {slot: at + 1 for slot, at in positions.items()}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "lengths", [[1, 3], [63], [64], [65, 1, 2], [130, 1, 64, 60]], ids=lambda lengths: str(lengths)
)
def test_pieces_equal_the_recurrence(lengths: list[int], exact: bool) -> None:
    layer = Layer(Heads(2, 4, 16, 32), len(lengths) + 1, seed=len(lengths))
    for slot in range(0, len(lengths), 2):
        layer.begin(slot)
    pieces = [(slot, 5 if slot % 2 == 0 else 0, count) for slot, count in enumerate(lengths)]
    layer.check(pieces, EXACT if exact else CHUNKED, exact=exact)


@pytest.mark.parametrize("exact", [True, False])
def test_tiled_heads_read_other_keys(exact: bool) -> None:
    layer = Layer(Heads(2, 4, 16, 16, tiled=True), 3)
    layer.begin(1)
    layer.check([(0, 0, 3), (1, 8, 2)], EXACT if exact else CHUNKED, exact=exact)


@pytest.mark.parametrize("exact", [True, False])
def test_chunked_prompts_and_decode_steps_make_one_sequence(exact: bool) -> None:
    """However a sequence is cut, it ends at the same state.

    To the byte where tokens go one by one, if all kernels sum in one order, as the interpreter does.
    """
    layer, tokens = Layer(Heads(1, 2, 16, 16), 3), 70
    inputs = layer.inputs(tokens)
    whole = layer.run(inputs, [(0, 0, tokens)], exact=exact)
    cuts = [0, 3, 4, 64, 65, 66, tokens]
    parts = []
    for first, last in itertools.pairwise(cuts):
        part = cut(inputs, first, last)
        single = last - first == 1
        parts.append(layer.run(part, [(1, first, last - first)], exact=exact, single=single))
    together = torch.cat(parts)
    assert torch.equal(layer.tail[0], layer.tail[1])
    if exact and INTERPRETED:
        assert torch.equal(whole, together)
        assert torch.equal(layer.matrix[0], layer.matrix[1])
    assert relative_rms(together, whole) < CHUNKED
    assert relative_rms(layer.matrix[1], layer.matrix[0]) < CHUNKED


def test_a_result_does_not_depend_on_what_else_is_in_the_step() -> None:
    layer = Layer(Heads(1, 2, 16, 16), 4)
    inputs = layer.inputs(90)
    pieces = [(0, 0, 7), (1, 0, 66), (2, 0, 17)]
    together = layer.run(inputs, pieces)
    states = layer.memory.clone()
    layer.memory.fill_(float("nan"))
    first = 0
    for piece in pieces:
        stop = first + piece[2]
        alone = layer.run(cut(inputs, first, stop), [piece])
        assert torch.equal(alone, together[first:stop])
        first = stop
    assert torch.equal(layer.memory.view(torch.int32), states.view(torch.int32))


def test_a_step_is_run_again_on_other_slots_and_positions() -> None:
    """Nothing of a recorded decode step stands in the launches but addresses."""
    layer = Layer(Heads(1, 2, 16, 16), 4)
    inputs = layer.inputs(2)
    rows = torch.tensor([[0, 0], [2, 0]], dtype=torch.int64, device=DEVICE)
    backend = engine("float")
    backend.record()
    own = layer.conv, layer.decay, layer.bias, layer.norm, layer.tail, layer.matrix
    result = delta_net(backend, *inputs, *own, rows, None, EPS)
    launches = backend.finish().launches
    assert [launch.name for launch in launches] == ["delta_input_kernel", "delta_step_kernel"]
    for position in range(3):
        rows.copy_(torch.tensor([[3, position], [1, position]], device=DEVICE))
        for each in inputs:
            each.copy_(torch.randn_like(each))
        wanted, tails, matrices = layer.wanted(inputs, [(3, position, 1), (1, position, 1)])
        for launch in launches:
            launch.run()
        assert relative_rms(result, wanted) < 2e-6
        for slot in (1, 3):
            assert relative_rms(layer.matrix[slot], matrices[slot]) < 2e-6
            assert torch.equal(layer.tail[slot], tails[slot].float())


def test_launches_name_all_that_they_read_and_write() -> None:
    layer = Layer(Heads(1, 1, 16, 16), 1)
    for single, exact in ((True, True), (False, True), (False, False)):
        backend = engine("float" if exact else "int8")
        backend.record()
        rows = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
        pieces = None if single else torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
        own = layer.conv, layer.decay, layer.bias, layer.norm, layer.tail, layer.matrix
        delta_net(backend, *layer.inputs(1), *own, rows, pieces, EPS)
        for launch in backend.finish().launches:
            given = {id(x) for x in launch.arguments.values() if isinstance(x, torch.Tensor)}
            assert given == {id(x) for x in (*launch.reads, *launch.writes)}


def test_small_decode_steps_leave_their_int8_form() -> None:
    layer = Layer(Heads(1, 2, 32, 32), 2)
    backend = engine()
    rows = torch.tensor([[0, 0]], dtype=torch.int64, device=DEVICE)
    own = layer.conv, layer.decay, layer.bias, layer.norm, layer.tail, layer.matrix
    out = delta_net(backend, *layer.inputs(1), *own, rows, None, EPS)
    left = prepare(backend, out, "int8")
    made = prepare(engine(), out.clone(), "int8")
    for one, other in ((left.values, made.values), (left.scales, made.scales), (left.sums, made.sums)):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_correlated_keys_keep_the_accuracy() -> None:
    """Tokens that repeat make the triangular system as bad as it gets."""
    layer = Layer(Heads(1, 1, 16, 16), 1, seed=3)
    mixed, z, b, a = layer.inputs(100)
    mixed.copy_(mixed[:1] + 0.05 * mixed)
    b.fill_(4.0)
    a.fill_(-6.0)
    wanted, _, matrices = layer.wanted((mixed, z, b, a), [(0, 0, 100)])
    result = layer.run((mixed, z, b, a), [(0, 0, 100)])
    assert relative_rms(result, wanted) < CHUNKED
    assert relative_rms(layer.matrix[0], matrices[0]) < CHUNKED


def test_the_inverse_of_a_triangle() -> None:
    torch.manual_seed(0)
    lower = torch.rand(64, 64, device=DEVICE).tril(-1)
    out = torch.empty_like(lower)
    _invert[(1,)](lower, out)
    wanted = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + lower.cpu().double())
    assert relative_rms(out, wanted) < 1e-4


@triton.jit  # type: ignore[untyped-decorator]
def _invert(lower_ptr: Any, out_ptr: Any) -> None:
    line = tl.arange(0, 64)
    place = line[:, None] * 64 + line[None, :]
    tl.store(out_ptr + place, unit_inverse(tl.load(lower_ptr + place), 64))


def test_the_log_of_a_decay_is_exact_near_zero() -> None:
    a = torch.linspace(-30, 40, 64, device=DEVICE)
    out = torch.empty_like(a)
    _decays[(1,)](a, out)
    wanted = -2.0 * torch.nn.functional.softplus(a.double() + 0.5)
    assert ((out.double() - wanted).abs() <= 1e-6 * wanted.abs()).all()


@triton.jit  # type: ignore[untyped-decorator]
def _decays(a_ptr: Any, out_ptr: Any) -> None:
    line = tl.arange(0, 64)
    tl.store(out_ptr + line, log_decay(tl.load(a_ptr + line), -2.0, 0.5))


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer(Heads(), 1)
    rows = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    own = layer.conv, layer.decay, layer.bias, layer.norm
    mixed, z, b, a = layer.inputs(1)
    states = layer.tail, layer.matrix
    for inputs, wrong in (
        ((mixed[:, 1:], z, b, a), states),
        ((mixed, z, b[:, :1], a), states),
        ((mixed, z, b, a), (layer.tail[:, :, :2], layer.matrix)),
        ((mixed, z, b, a), (layer.tail, layer.matrix.transpose(2, 3))),
    ):
        with pytest.raises(InternalError, match="DeltaNet"):
            delta_net(engine(), *inputs, *own, *wrong, rows, None, EPS)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [Heads(16, 48, 128, 128), Heads(16, 32, 128, 128)])
def test_layers_of_real_sizes(heads: Heads, dtype: torch.dtype) -> None:
    layer = Layer(heads, 4, dtype=dtype)
    layer.begin(2)
    layer.check([(0, 0, 700), (2, 9, 1), (1, 0, 64), (3, 0, 129)], 5e-3)
    layer.check([(0, 700, 1), (2, 10, 1), (1, 64, 1), (3, 129, 1)], 1e-5, single=True)
