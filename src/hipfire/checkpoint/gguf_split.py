"""Models that were split into several GGUF files: which files belong together, and in which order.

The metadata of the files decides, never their names; names only help to tell two sets in one folder apart and
to say which file is missing. Does not know tensors beyond their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hipfire.base.errors import ArtifactError, HipfireError
from hipfire.checkpoint.gguf_header import GgufHeader, read_header
from hipfire.checkpoint.mapped import MappedFile, unreadable
from hipfire.checkpoint.shard_names import file_set, shard_count, shard_name


class Place(NamedTuple):
    """A shard's own account: it is number `number` (from 0) of `total`; `tensors` in all, -1 if not said."""

    number: int
    total: int
    tensors: int


class Shard(NamedTuple):
    """One opened file of a model."""

    file: MappedFile
    header: GgufHeader


def open_set(path: Path) -> list[Shard]:
    """Open the model that the file at `path` belongs to: that file alone, or all its shards in order.

    Raises:
        ArtifactError: a file is damaged, or a shard is missing (it is named), occurs twice or disagrees with
            the others, or shards were joined by plain concatenation.
        UnsupportedError: as `read_header`.
    """
    search = _Search(path)
    chosen: list[Shard] = []
    try:
        chosen = search.run()
        return chosen
    finally:
        kept = {id(shard.file) for shard in chosen}
        for shard in search.opened:
            if id(shard.file) not in kept:
                shard.file.close()


def split_place(header: GgufHeader, path: Path) -> Place | None:
    """Return a file's place in a set, or None for a model in one file.

    Raises:
        ArtifactError: the `split.*` keys have wrong types or contradict each other.
    """
    if "split.count" not in header.keys:
        return None
    numbers = {}
    for name, default in (("no", None), ("count", None), ("tensors.count", -1)):
        value = header.keys.get(f"split.{name}", default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArtifactError(f"is {value!r}, not a whole number", path=path, field=f"split.{name}")
        numbers[name] = value
    place = Place(numbers["no"], numbers["count"], numbers["tensors.count"])
    if place.total <= 1:
        return None
    if not 0 <= place.number < place.total:
        raise ArtifactError(f"is {place.number}, but there are {place.total}", path=path, field="split.no")
    return place


class _Search:
    """Finds the shards beside a file. `opened` holds every file that was opened on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[Shard] = []
        self._by_number: dict[int, list[Shard]] = {}
        self._broken: dict[str, HipfireError] = {}

    def run(self) -> list[Shard]:
        first = self._open(self.path)
        place = split_place(first.header, self.path)
        if place is None:
            return [first]
        _refuse_joined(first, place)
        self._by_number[place.number] = [first]
        self._gather(place)
        shards = [self._only(number, place) for number in range(place.total)]
        for shard in shards:
            _refuse_joined(shard, place)
        total = sum(len(shard.header.tensors) for shard in shards)
        if place.tensors not in (-1, total):
            raise ArtifactError(
                f"is {place.tensors}, but the {place.total} shards hold {total}",
                path=self.path,
                field="split.tensors.count",
                hint="the shards come from different conversions: download them again",
            )
        return shards

    def _open(self, path: Path) -> Shard:
        file = MappedFile(path)
        try:
            shard = Shard(file, read_header(file))
        except BaseException:
            file.close()
            raise
        self.opened.append(shard)
        return shard

    def _gather(self, place: Place) -> None:
        try:
            others = sorted(
                path
                for path in self.path.parent.iterdir()
                if path.name != self.path.name and path.suffix.lower() == ".gguf" and path.is_file()
            )
        except OSError as error:
            raise unreadable(self.path.parent, error) from error
        stem = file_set(self.path)
        namesakes = [path for path in others if stem and file_set(path) == stem]
        self._collect(namesakes, place)
        # files may have been renamed; then every neighbour is asked, which takes longer. one that is named as
        # a shard of another set stays out: it would fill the place of a missing file with foreign weights
        if len(self._by_number) < place.total:
            strangers = (path for path in others if path not in namesakes and not (stem and file_set(path)))
            self._collect(strangers, place)

    def _collect(self, paths: Iterable[Path], place: Place) -> None:
        for path in paths:
            try:
                shard = self._open(path)
                other = split_place(shard.header, path)
            except HipfireError as error:
                # a damaged neighbour that is not needed is no reason to refuse
                self._broken[path.name] = error
                continue
            if other is not None and (other.total, other.tensors) == (place.total, place.tensors):
                self._by_number.setdefault(other.number, []).append(shard)

    def _only(self, number: int, place: Place) -> Shard:
        shards = self._by_number.get(number, [])
        if len(shards) > 1:
            stem = file_set(self.path)
            shards = [s for s in shards if s.file.path == self.path] or [
                s for s in shards if stem and file_set(s.file.path) == stem
            ]
        if len(shards) == 1:
            return shards[0]
        candidates = self._by_number.get(number, [])
        if candidates:
            names = ", ".join(shard.file.path.name for shard in candidates)
            raise ArtifactError(
                f"several files claim to be shard {number + 1} of {place.total}: {names}",
                path=self.path,
                hint="keep every model in a folder of its own",
            )
        expected = self._expected_name(number, place)
        if expected in self._broken:
            raise self._broken[expected]
        raise ArtifactError(
            f"shard {number + 1} of {place.total} is missing" + (f" ({expected})" if expected else ""),
            path=self.path,
            hint="put all parts of the model into one folder",
        )

    def _expected_name(self, number: int, place: Place) -> str:
        if shard_count(self.path.name) != place.total:
            return ""
        return shard_name(self.path.name, number + 1)


def _refuse_joined(shard: Shard, place: Place) -> None:
    """Refuse a shard with foreign bytes after its last tensor: the parts of a set are files of their own."""
    alignment = shard.header.alignment
    end = -(-shard.header.end // alignment) * alignment
    if shard.file.size > end:
        foreign = f"{shard.file.size - end} foreign bytes follow its last tensor"
        raise ArtifactError(
            f"{foreign}, and it is shard {place.number + 1} of {place.total}",
            path=shard.file.path,
            offset=end,
            hint="parts of a split GGUF must not be concatenated: keep them as separate files in one folder",
        )
