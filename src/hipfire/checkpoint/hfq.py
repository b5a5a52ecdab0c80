"""Reading HFQM containers.

Everything that the header and the index claim is checked against the file before it is used. Does not know
which models or weight formats can run; tensors of unknown formats are listed with their stored size. The
version field is kept but not judged, and bytes after the last payload (a bundle's second section and its
trailer) are ignored, both as in the original loader.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TensorInfo, TextAssets
from hipfire.checkpoint import chat_templates, jsontext
from hipfire.checkpoint.hfq_layout import (
    ALIGNMENT,
    COUNT,
    ENTRY_KIND,
    ENTRY_TAIL,
    HEADER,
    MAGIC,
    NAME_LENGTH,
    SMALLEST_ENTRY,
    size_fault,
)
from hipfire.checkpoint.mapped import MappedFile
from hipfire.checkpoint.mapped_checkpoint import MappedCheckpoint, Span, TensorTable


class Header(NamedTuple):
    """The fixed fields at the start of a container; offsets are bytes from the start of the file."""

    version: int
    arch_id: int
    n_tensors: int
    metadata_offset: int
    data_offset: int


class HfqFile(MappedCheckpoint):
    """An open HFQM container.

    `metadata` is the whole JSON object, `arch_id` and `version` are the header's fields. Shapes are as
    stored: [out, in], except that containers which the original engine made from GGUF hold [in, out].
    """

    kind: ClassVar[str] = "hfq"

    def __init__(self, file: MappedFile) -> None:
        header = _read_header(file)
        region = file.view(header.metadata_offset, header.data_offset - header.metadata_offset)
        length = jsontext.object_end(region, path=file.path, field="metadata", base=header.metadata_offset)
        self.metadata: Mapping[str, Any] = jsontext.parse_object(
            region[:length], path=file.path, field="metadata", base=header.metadata_offset
        )
        self.version = header.version
        self.arch_id = header.arch_id
        self.model_config: Mapping[str, Any] = _section(self.metadata, "config", file.path)
        index = _Index(file, header, header.metadata_offset + length)
        tensors, spans = index.read(from_gguf=self.metadata.get("source") == "gguf")
        super().__init__(file.path, [file], TensorTable(tensors), spans)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open and check a container.

        Raises:
            ArtifactError: unreadable, no HFQM container, or damaged; names field and byte offset.
        """
        file = MappedFile(Path(path))
        try:
            return cls(file)
        except BaseException:
            file.close()
            raise

    def text_assets(self) -> TextAssets:
        """Return tokenizer, templates and generation defaults.

        Raises:
            ArtifactError: one of them has the wrong JSON type.
        """
        tokenizer = self.metadata.get("tokenizer")
        if tokenizer is not None and not isinstance(tokenizer, str):
            raise ArtifactError("must be a string", path=self.path, field="metadata.tokenizer")
        config = _section(self.metadata, "tokenizer_config", self.path)
        gguf = _section(self.metadata, "gguf_meta", self.path)
        templates = chat_templates.from_config(config, path=self.path, field="metadata.tokenizer_config")
        return TextAssets(
            # the original converter stores "{}" where the source had no tokenizer.json
            tokenizer_json=tokenizer if tokenizer and tokenizer.strip() != "{}" else None,
            tokenizer_config=config,
            generation_config=_section(self.metadata, "generation_config", self.path),
            model_config=self.model_config,
            gguf=chat_templates.vocabulary_keys(gguf) or None,
            chat_templates=templates or chat_templates.from_gguf(gguf, path=self.path),
        )


def _section(metadata: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    value = metadata.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ArtifactError("must be a JSON object", path=path, field=f"metadata.{name}")
    return value


def _read_header(file: MappedFile) -> Header:
    def fail(reason: str, field: str, offset: int, hint: str = "") -> ArtifactError:
        return ArtifactError(reason, path=file.path, field=field, offset=offset, hint=hint)

    if file.size < HEADER.size:
        raise fail(
            f"the file has {file.size} bytes, a header has {HEADER.size}", "header", 0, "download it again"
        )
    magic, *numbers = HEADER.unpack(file.view(0, HEADER.size))
    header = Header(*numbers)
    if magic != MAGIC:
        raise fail(f"is {magic!r}, not {MAGIC!r}: this is no HFQM container", "magic", 0)
    if not HEADER.size <= header.metadata_offset < file.size:
        raise fail(f"{header.metadata_offset} lies outside the file", "metadata_offset", 16)
    if header.data_offset % ALIGNMENT:
        raise fail(f"{header.data_offset} is not a multiple of {ALIGNMENT}", "data_offset", 24)
    if header.data_offset <= header.metadata_offset:
        raise fail(f"{header.data_offset} lies before the metadata", "data_offset", 24)
    if header.data_offset > file.size:
        reason = f"{header.data_offset} lies behind the end of the file ({file.size} bytes)"
        raise fail(reason, "data_offset", 24, "the file is cut off: download it again")
    return header


class _Index:
    """The tensor table between the metadata and the payloads."""

    def __init__(self, file: MappedFile, header: Header, start: int) -> None:
        self._file = file
        self._header = header
        self._data = file.view(0, header.data_offset)
        self._pos = start

    def read(self, *, from_gguf: bool) -> tuple[dict[str, TensorInfo], dict[str, Span]]:
        """Return the tensors and their places. Of two entries with one name the later counts."""
        start = self._pos
        (count,) = self._take(COUNT, "index.n_tensors")
        if count != self._header.n_tensors:
            raise self._fail(
                f"{count} here but {self._header.n_tensors} in the header", "index.n_tensors", start
            )
        if count * SMALLEST_ENTRY > len(self._data) - self._pos:
            raise self._fail(f"{count} entries do not fit before data_offset", "index.n_tensors", start)
        tensors: dict[str, TensorInfo] = {}
        spans: dict[str, Span] = {}
        payload = self._header.data_offset
        for number in range(count):
            at = self._pos
            info = self._entry(f"index[{number}]")
            fault = size_fault(info, from_gguf=from_gguf)
            if fault:
                raise self._fail(f"{info.name[:80]}: {fault}", f"index[{number}].data_size", at)
            if payload + info.nbytes > self._file.size:
                reach = f"{info.nbytes} bytes from byte {payload}"
                raise ArtifactError(
                    f"{info.name[:80]}: {reach} leave the file ({self._file.size} bytes)",
                    path=self._file.path,
                    field=f"index[{number}].data_size",
                    offset=at,
                    hint="the file is cut off: download it again",
                )
            tensors.pop(info.name, None)
            tensors[info.name] = info
            spans[info.name] = Span(self._file, payload)
            payload += info.nbytes
        return tensors, spans

    def _entry(self, field: str) -> TensorInfo:
        start = self._pos
        (length,) = self._take(NAME_LENGTH, f"{field}.name")
        try:
            name = str(self._bytes(length, f"{field}.name"), "utf-8")
        except UnicodeDecodeError as error:
            raise self._fail("name is not UTF-8", f"{field}.name", start) from error
        if not name:
            raise self._fail("name is empty", f"{field}.name", start)
        qtype, n_dims = self._take(ENTRY_KIND, f"{field}.quant_type")
        shape = self._take(struct.Struct(f"<{n_dims}I"), f"{field}.shape")
        group_size, nbytes = self._take(ENTRY_TAIL, f"{field}.data_size")
        return TensorInfo(name, qtype, shape, nbytes, group_size)

    def _take(self, layout: struct.Struct, field: str) -> tuple[Any, ...]:
        return layout.unpack(self._bytes(layout.size, field))

    def _bytes(self, length: int, field: str) -> memoryview:
        start = self._pos
        if start + length > len(self._data):
            raise self._fail("the index runs into data_offset", field, start)
        self._pos = start + length
        return self._data[start : self._pos]

    def _fail(self, reason: str, field: str, offset: int) -> ArtifactError:
        return ArtifactError(reason, path=self._file.path, field=field, offset=offset)
