"""The one way to open a model from a path: what it is decides its content, never its extension.

Does not know any container's layout; the readers are in the files beside this one.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TensorInfo, TextAssets
from hipfire.checkpoint import foreign
from hipfire.checkpoint.gguf import GgufFile
from hipfire.checkpoint.gguf_header import MAGIC as GGUF_MAGIC
from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.hfq_layout import MAGIC as HFQ_MAGIC
from hipfire.checkpoint.mapped import is_folder, unreadable
from hipfire.checkpoint.safetensors import INDEX_NAME, SafetensorsModel, weight_files

_CONTAINERS = (HFQ_MAGIC, GGUF_MAGIC, GGUF_MAGIC[::-1])


class Checkpoint(Protocol):
    """A source of weights, whatever its files look like.

    `kind` is "hfq", "gguf" or "safetensors". `tensors` is in file order. `model_config` is the Hugging Face
    config, or for GGUF the metadata keys.
    """

    @property
    def kind(self) -> str:
        """Return which kind of files this is."""

    @property
    def path(self) -> Path:
        """Return the path that was opened."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the tensors by name."""

    @property
    def model_config(self) -> Mapping[str, Any]:
        """Return the model's configuration."""

    def raw(self, name: str) -> memoryview:
        """Return a tensor's stored bytes: read-only, mapped, not copied."""

    def release(self, name: str, nbytes: int | None = None) -> None:
        """Let a tensor's pages, or those of its first `nbytes`, leave resident memory."""

    def text_assets(self) -> TextAssets:
        """Return everything about text that the checkpoint carries."""

    def close(self) -> None:
        """Give back the files."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a model: an HFQM container, a GGUF file (any shard), a safetensors file, or a folder of one.

    Raises:
        ArtifactError: nothing there, unreadable, several models in a folder, unknown content, or damage.
        UnsupportedError: a readable file of a variant that hipfire does not handle (big-endian GGUF, say).
    """
    path = Path(path)
    return _open_folder(path) if is_folder(path) else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    head = _head(path)
    if head.startswith(HFQ_MAGIC):
        return HfqFile.open(path)
    if head.startswith((GGUF_MAGIC, GGUF_MAGIC[::-1])):
        return GgufFile.open(path)
    if head[8:9] == b"{" or path.suffix.lower() == ".safetensors":
        return SafetensorsModel.open(path)
    what = foreign.describe(head)
    raise ArtifactError(
        f"is {what}, not a model file" if what else f"is no known model file (starts with {head[:4]!r})",
        path=path,
        hint=foreign.advice(what),
    )


def _open_folder(folder: Path) -> Checkpoint:
    if weight_files(folder) or (folder / INDEX_NAME).is_file():
        return SafetensorsModel.open(folder)
    names = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    models = [path for path in names if _head(path)[:4] in _CONTAINERS]
    if not models:
        raise _nothing_in(folder, names)
    checkpoint = _open_file(models[0])
    members = set(checkpoint.files) if isinstance(checkpoint, GgufFile) else {models[0]}
    others = [path.name for path in models if path not in members]
    if others:
        checkpoint.close()
        raise ArtifactError(
            f"holds several models: {', '.join([models[0].name, *others][:8])}",
            path=folder,
            hint="give the path of the one to use",
        )
    return checkpoint


def _nothing_in(folder: Path, names: list[Path]) -> ArtifactError:
    pickles = [path.name for path in names if path.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        reason = f"holds only PyTorch pickle weights ({pickles[0]})"
        return ArtifactError(reason, path=folder, hint=foreign.advice("a pickle"))
    reason = "is an empty folder" if not names else "holds no model weights"
    return ArtifactError(reason, path=folder, hint="expected *.safetensors, *.gguf or one HFQM container")


def _head(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ArtifactError("not a regular file", path=path, hint="give the model file itself")
        with path.open("rb") as stream:
            return stream.read(foreign.SAMPLE)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
