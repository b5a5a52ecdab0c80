"""GGUF models, in one file or split, as a checkpoint.

Does not know model families: keys are delivered as they stand, scalar or per-layer array alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TensorInfo, TextAssets
from hipfire.checkpoint import chat_templates
from hipfire.checkpoint.gguf_split import Shard, open_set
from hipfire.checkpoint.mapped_checkpoint import MappedCheckpoint, Span, TensorTable


class GgufFile(MappedCheckpoint):
    """An open GGUF model.

    `model_config` holds the metadata keys of the (first) file, with their full names. Shapes are row-major:
    the file's dims reversed. Tensor qtypes are `GGUF_BASE` + ggml type.
    """

    kind: ClassVar[str] = "gguf"

    def __init__(self, path: Path, shards: list[Shard]) -> None:
        tensors: dict[str, TensorInfo] = {}
        spans: dict[str, Span] = {}
        for file, header in shards:
            for name, info in header.tensors.items():
                if name in tensors:
                    raise ArtifactError(f"tensor {name} is in two shards", path=file.path)
                tensors[name] = info
                spans[name] = Span(file, header.offsets[name])
        super().__init__(path, [shard.file for shard in shards], TensorTable(tensors), spans)
        self.version = shards[0].header.version
        self.model_config: Mapping[str, Any] = shards[0].header.keys

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open and check a model; any shard of a split model stands for the whole.

        Raises:
            ArtifactError: a file is unreadable, damaged or missing.
            UnsupportedError: big-endian files, other versions, unknown tensor types.
        """
        shards = open_set(Path(path))
        try:
            return cls(Path(path), shards)
        except BaseException:
            for shard in shards:
                shard.file.close()
            raise

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files of the model in shard order."""
        return tuple(file.path for file in self._files)

    def text_assets(self) -> TextAssets:
        """Return the vocabulary keys and the chat templates.

        Raises:
            ArtifactError: a chat template is not a string.
        """
        return TextAssets(
            model_config=self.model_config,
            gguf=chat_templates.vocabulary_keys(self.model_config) or None,
            chat_templates=chat_templates.from_gguf(self.model_config, path=self.path),
        )
