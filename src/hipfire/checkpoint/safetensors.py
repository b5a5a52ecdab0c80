"""Safetensors models as a checkpoint: a Hugging Face folder, or one file with its configs beside it.

With an index only the files that it lists are opened, and only for the tensors that it lists. Tensors of
element types that hipfire does not compute with (an integer mask, say) do not block a load; using one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, NamedTuple, Self

from hipfire.base.errors import ArtifactError
from hipfire.base.qtypes import QType
from hipfire.base.types import TensorInfo, TextAssets
from hipfire.checkpoint import hf_folder
from hipfire.checkpoint.mapped import MappedFile, is_folder, unreadable
from hipfire.checkpoint.mapped_checkpoint import MappedCheckpoint, Span, TensorTable
from hipfire.checkpoint.safetensors_header import Entry, read_header

INDEX_NAME = "model.safetensors.index.json"
WEIGHT_QTYPES = {"F16": QType.F16, "BF16": QType.BF16, "F32": QType.F32}


class Part(NamedTuple):
    """A weight file and its header."""

    file: MappedFile
    entries: Mapping[str, Entry]


class SafetensorsModel(MappedCheckpoint):
    """An open safetensors model; `tensors` has the names and shapes of the files.

    `tensors.refused` maps the tensors of other element types than F16, BF16 and F32 to that type's name.
    """

    kind: ClassVar[str] = "safetensors"

    def __init__(
        self,
        path: Path,
        model_config: dict[str, Any],
        parts: Sequence[Part],
        listed: Mapping[str, str] | None,
    ) -> None:
        infos: dict[str, TensorInfo] = {}
        refused: dict[str, str] = {}
        spans: dict[str, Span] = {}
        for file, entries in parts:
            for name, entry in entries.items():
                if listed is not None and listed.get(name) != file.path.name:
                    continue
                if name in spans:
                    raise ArtifactError(
                        f"tensor {name} is also in {spans[name].file.path.name}",
                        path=file.path,
                        hint=f"remove the file that is not part of the model, or add {INDEX_NAME}",
                    )
                spans[name] = Span(file, entry.offset)
                if entry.dtype in WEIGHT_QTYPES:
                    infos[name] = TensorInfo(name, WEIGHT_QTYPES[entry.dtype], entry.shape, entry.nbytes)
                else:
                    refused[name] = entry.dtype
        for name, file_name in (listed or {}).items():
            if name not in spans:
                raise ArtifactError(
                    f"tensor {name} is not in {file_name}, where {INDEX_NAME} lists it",
                    path=path,
                    hint="the index is stale: download the model again",
                )
        super().__init__(path, [part.file for part in parts], TensorTable(infos, refused), spans)
        self.model_config: Mapping[str, Any] = model_config

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open and check a folder, or a single file whose `config.json` lies beside it.

        Raises:
            ArtifactError: `config.json`, a listed file or a listed tensor is missing, names clash, or a file
                is damaged or no safetensors file.
        """
        path = Path(path)
        folder = path if is_folder(path) else path.parent
        listed = _index(path) if folder == path else None
        if listed is not None:
            paths = _listed_files(path, listed)
        else:
            paths = weight_files(path) if folder == path else [path]
        if not paths:
            raise ArtifactError("holds no *.safetensors file", path=path, hint="download the model's weights")
        with ExitStack() as stack:
            files = [stack.enter_context(MappedFile(file)) for file in paths]
            parts = [Part(file, read_header(file)) for file in files]
            config = hf_folder.read_model_config(folder)
            model = cls(path, config, parts, listed)
            stack.pop_all()
            return model

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the weight files."""
        return tuple(file.path for file in self._files)

    def text_assets(self) -> TextAssets:
        """Return tokenizer, templates and generation defaults of the folder; errors as `read_text_assets`."""
        return hf_folder.read_text_assets(self._files[0].path.parent, dict(self.model_config))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, sorted by name; hidden files are not among them.

    Raises:
        ArtifactError: the folder cannot be read.
    """
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if path.suffix == ".safetensors" and not path.name.startswith(".") and path.is_file()
        )
    except OSError as error:
        raise unreadable(folder, error) from error


def _index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    index = hf_folder.read_json(path)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError("must be an object of tensor names and files", path=path, field="weight_map")
    for name, file in weight_map.items():
        # a name with a folder in it could reach outside the model
        plain = isinstance(file, str) and file == PurePosixPath(file).name == PureWindowsPath(file).name
        if not plain or file == "..":
            raise ArtifactError(
                f"{str(file)[:80]!r} is no plain file name", path=path, field=f"weight_map.{name}"
            )
    return weight_map


def _listed_files(folder: Path, listed: Mapping[str, str]) -> list[Path]:
    paths = [folder / name for name in sorted(set(listed.values()))]
    for path in paths:
        if not path.is_file():
            raise ArtifactError(
                f"{path.name} is missing, but {INDEX_NAME} lists it",
                path=folder,
                hint="the index is stale or the download incomplete: download the model again",
            )
    return paths
