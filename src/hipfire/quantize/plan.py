"""What a conversion will write: every tensor of the container, where it comes from and what it becomes.

The plan reads descriptions only. A stack of experts becomes one matrix for each expert, whatever the source
holds it in; gate and up stay one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hipfire.base.errors import UnsupportedError
from hipfire.base.qtypes import BLOCKS, QType
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.names import Change, NamedCheckpoint, StoredTensor
from hipfire.checkpoint.stacks import StackPiece
from hipfire.models.family import ModelConfig
from hipfire.quant.registry import format_of
from hipfire.quantize.policy import Recipe

# formats that hold the same bytes under two numbers, so that a copy loses nothing
SAME_BYTES: Mapping[int, int] = {
    QType.GGUF_Q8_0: QType.Q8F16,
    QType.GGUF_F16: QType.F16,
    QType.GGUF_F32: QType.F32,
}
# changes that move rows and columns, or nothing: the stored numbers stay what they are
MOVES: tuple[Change, ...] = ("none", "q_rows", "k_rows", "gate_rows")
# in the canonical names of stacks of experts, and in no other name
STACK = "mlp.experts."


@dataclass(frozen=True, slots=True)
class SourceRows:
    """`rows` rows of a stored tensor from row `first` on; it has `total`, whatever order its sizes are in."""

    info: TensorInfo
    first: int
    rows: int
    total: int

    @property
    def nbytes(self) -> int:
        """Return the stored bytes of these rows."""
        return self.info.nbytes * self.rows // max(1, self.total)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the container: the stored rows that it is made of, in order, and what it becomes.

    `change` leads from the stored form to the canonical one. `copied` tells that the source's bytes already
    are in the wanted format.
    """

    info: TensorInfo
    parts: tuple[SourceRows, ...]
    change: Change
    copied: bool

    @property
    def source_nbytes(self) -> int:
        """Return the bytes of the source that it is made of."""
        return sum(part.nbytes for part in self.parts)


def plan_tensors(
    named: NamedCheckpoint, config: ModelConfig, chosen: Recipe, kept: tuple[str, ...] = ()
) -> list[PlannedTensor]:
    """Return the container's tensors in the order of their names, experts in that of their numbers.

    `kept` are stored tensors that the model does not read and the container has all the same. Raises
    ArtifactError if a tensor is missing, UnsupportedError if one cannot be converted.
    """
    needed = config.tensors()
    mixture = any(STACK in name for name in needed)
    plan: dict[tuple[str, int], PlannedTensor] = {}
    for name, shape in needed.items():
        plan.update(_planned(name, named.require(name, shape), shape, chosen, mixture))
    for name in config.optional_tensors():
        stored = named.find(name)
        if stored is not None:
            plan.update(_planned(name, stored, stored.info.shape, chosen, mixture))
    for name in kept:
        info = named.checkpoint.tensors[name]
        plan.update(_planned(name, StoredTensor(info), info.shape, chosen, mixture))
    return [plan[key] for key in sorted(plan)]


def _planned(
    name: str, stored: StoredTensor, shape: tuple[int, ...], chosen: Recipe, mixture: bool
) -> Iterator[tuple[tuple[str, int], PlannedTensor]]:
    """Yield what becomes of a canonical tensor, each with its place in the order of the container."""
    if STACK in name and len(shape) == 3:
        experts, rows, cols = shape
        info = stored.info
        pieces = stored.pieces or (StackPiece(info, 0, experts, 0, rows),)
        for expert in range(experts):
            parts = tuple(
                SourceRows(
                    piece.info,
                    (expert - piece.expert) * piece.rows,
                    piece.rows,
                    piece.experts * piece.rows,
                )
                for piece in pieces
                if piece.expert <= expert < piece.expert + piece.experts
            )
            own = expert_name(name, expert)
            yield (name, expert), _tensor(own, (rows, cols), parts, stored.change, chosen, mixture)
        return
    rows = TensorInfo(name, stored.info.qtype, shape, 0).rows_cols[0]
    parts = (SourceRows(stored.info, 0, rows, rows),)
    yield (name, 0), _tensor(name, shape, parts, stored.change, chosen, mixture)


def expert_name(stack: str, expert: int) -> str:
    """Return the name of one expert's matrix in a container."""
    before, _, projection = stack.rpartition(".")
    return f"{before}.{expert}.{projection}.weight"


def _tensor(
    name: str,
    shape: tuple[int, ...],
    parts: tuple[SourceRows, ...],
    change: Change,
    chosen: Recipe,
    mixture: bool,
) -> PlannedTensor:
    qtype = chosen.qtype(name, shape, mixture=mixture)
    elements = BLOCKS[qtype].elements
    bare = TensorInfo(name, qtype, shape, 0)
    rows, cols = bare.rows_cols
    nbytes = format_of(qtype).nbytes(rows, cols)
    for part in parts:
        if not format_of(part.info.qtype).has_whole_rows(part.info.nbytes, part.total, cols):
            raise UnsupportedError(
                f"tensor {part.info.name} is packed across its rows",
                hint="convert the original checkpoint instead of this container",
            )
    same = all(SAME_BYTES.get(part.info.qtype, part.info.qtype) == qtype for part in parts)
    copied = same and change in MOVES and sum(part.nbytes for part in parts) == nbytes
    return PlannedTensor(
        TensorInfo(name, qtype, shape, nbytes, elements if elements > 1 else 0), parts, change, copied
    )
