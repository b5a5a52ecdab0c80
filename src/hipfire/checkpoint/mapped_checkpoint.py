"""What all kinds of checkpoint share: named tensors, each a byte range of a mapped file.

Does not know how a container describes its tensors; the readers hand in the finished tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.mapped import MappedFile


class Span(NamedTuple):
    """Where a tensor's bytes start."""

    file: MappedFile
    offset: int


class TensorTable(Mapping[str, TensorInfo]):
    """Tensors by name in file order, beside those whose element type hipfire does not read.

    Iteration and length cover the readable ones. A lookup, `get` or `in` of a refused name raises
    UnsupportedError, so that "missing" is never said of a tensor that is there.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], refused: Mapping[str, str] | None = None) -> None:
        self._infos = dict(infos)
        self.refused: Mapping[str, str] = dict(refused or {})

    def __getitem__(self, name: str) -> TensorInfo:
        if name in self.refused:
            raise UnsupportedError(
                f"tensor {name} has element type {self.refused[name]}, which is not supported as a weight",
                hint="use a checkpoint stored as BF16, F16 or F32",
            )
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


class MappedCheckpoint:
    """Tensors as views of mapped files. Closing it leaves views that are still held valid."""

    kind: ClassVar[str] = ""

    def __init__(
        self, path: Path, files: Sequence[MappedFile], tensors: TensorTable, spans: Mapping[str, Span]
    ) -> None:
        self.path = path
        self.tensors = tensors
        self._files = tuple(files)
        self._spans = spans

    def raw(self, name: str) -> memoryview:
        """Return the stored bytes of a tensor: a read-only view, `tensors[name].nbytes` long, no copy.

        Raises:
            ArtifactError: there is no such tensor, or its file changed since it was opened.
            UnsupportedError: the tensor's element type is not one that hipfire reads.
        """
        info, span = self._find(name)
        return span.file.view(span.offset, info.nbytes)

    def release(self, name: str, nbytes: int | None = None) -> None:
        """Let pages of the tensor, or of its first `nbytes`, leave memory; `raw` brings them back."""
        info, span = self._find(name)
        span.file.release(span.offset, info.nbytes if nbytes is None else min(nbytes, info.nbytes))

    def close(self) -> None:
        """Give back the files."""
        for file in self._files:
            file.close()

    def _find(self, name: str) -> tuple[TensorInfo, Span]:
        info = self.tensors.get(name)
        if info is None:
            raise ArtifactError(f"no tensor named {name!r}", path=self.path)
        return info, self._spans[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
