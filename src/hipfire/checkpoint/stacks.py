"""Stacks of experts: one tensor for the model, in checkpoints often several.

A stack is [experts, rows, cols]. Files hold it whole, or an expert at a time, or cut by the rows of an expert
(gate and up), or both. This file finds the pieces by name; it does not know which stacks a model has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TensorInfo

# stands for an expert's number in the names of pieces
EXPERT = "{x}"
# a file cannot name more experts than this, whatever it holds
MOST_EXPERTS = 65536


@dataclass(frozen=True, slots=True)
class StackPiece:
    """A stored tensor with `experts` experts from number `expert` on: of each, `rows` rows from `row` on.

    Its own rows are those of one expert after the other.
    """

    info: TensorInfo
    expert: int
    experts: int
    row: int
    rows: int


def find_pieces(
    name: str, forms: Sequence[Sequence[str]], find: Callable[[str], TensorInfo | None]
) -> tuple[StackPiece, ...]:
    """Return what makes up the stack `name`, experts and rows in order, or nothing if it is not there.

    `forms` are the other ways of storing it: the names of what an expert's rows consist of, with `{x}` for
    the expert's number where every expert has tensors of its own. Raises ArtifactError where pieces have no
    common shape.
    """
    whole = find(name)
    if whole is not None:
        return tuple(_stacked(name, [whole]))
    for form in forms:
        if any(EXPERT in part for part in form):
            pieces = tuple(_single(name, form, find))
        else:
            found = [find(part) for part in form]
            known = [info for info in found if info is not None]
            pieces = tuple(_stacked(name, known)) if len(known) == len(form) else ()
        if pieces:
            return pieces
    return ()


def stack_info(name: str, pieces: Sequence[StackPiece]) -> TensorInfo:
    """Return the stack as one tensor, with the type of its first piece."""
    first = pieces[0].info
    experts = max(piece.expert + piece.experts for piece in pieces)
    rows = max(piece.row + piece.rows for piece in pieces)
    shape = (experts, rows, first.shape[-1])
    return TensorInfo(name, first.qtype, shape, sum(piece.info.nbytes for piece in pieces), first.group_size)


def _stacked(name: str, found: Sequence[TensorInfo]) -> Iterator[StackPiece]:
    """Yield tensors [experts, rows, cols] as pieces whose rows follow one another."""
    row = 0
    for info in found:
        if len(info.shape) != 3 or (info.shape[0], info.shape[2]) != (found[0].shape[0], found[0].shape[-1]):
            raise _unlike(name, info)
        yield StackPiece(info, 0, info.shape[0], row, info.shape[1])
        row += info.shape[1]


def _single(name: str, form: Sequence[str], find: Callable[[str], TensorInfo | None]) -> Iterator[StackPiece]:
    """Yield the matrices of one expert after the other, as long as there are any."""
    first: list[TensorInfo] = []
    for expert in range(MOST_EXPERTS):
        found = [find(part.replace(EXPERT, str(expert))) for part in form]
        if all(info is None for info in found):
            return
        row = 0
        for index, info in enumerate(found):
            if info is None:
                raise ArtifactError(
                    f"expert {expert} is incomplete: {form[index].replace(EXPERT, str(expert))} is missing",
                    field=f"tensor {name}",
                    hint="the checkpoint is incomplete; download or convert it again",
                )
            if expert == 0:
                first.append(info)
            if len(info.shape) != 2 or info.shape != first[index].shape or info.shape[1] != first[0].shape[1]:
                raise _unlike(name, info)
            yield StackPiece(info, expert, 1, row, info.shape[0])
            row += info.shape[0]


def _unlike(name: str, info: TensorInfo) -> ArtifactError:
    return ArtifactError(
        f"has shape {list(info.shape)}, which the other experts of {name} do not have",
        field=f"tensor {info.name}",
        hint="config and weights belong to different models",
    )
