"""Constructions of several parts that come about as a whole or not at all.

Parts are owners: things with a `release`. While a construction runs, a `Staging` holds them; if it fails,
they are released in reverse order, and the error that ended it goes on. At the end `publish` hands them out,
once.
This file does not know what the parts are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from hipfire.base.errors import InternalError


class Owner(Protocol):
    """Something that holds memory or another resource, and can give it back once."""

    def release(self) -> None:
        """Give it back."""


Part = TypeVar("Part", bound=Owner)


class Staging(Generic[Part]):
    """A construction: `with Staging(pool.take) as staging:`, takes, and `staging.publish()` as its last act.

    `allocate` makes an owner of a number of bytes. Leaving the `with` releases whatever was not published.
    """

    def __init__(self, allocate: Callable[[int], Part]) -> None:
        self._allocate = allocate
        self._staged: list[tuple[str, Part]] = []
        self._closed = False

    def __enter__(self) -> Staging[Part]:
        return self

    def take(self, name: str, nbytes: int) -> Part:
        """Allocate and stage; what the allocator raises goes through. `name` is for messages."""
        return self.stage(name, lambda: self._allocate(nbytes))

    def stage(self, name: str, make: Callable[[], Part]) -> Part:
        """Stage an owner that is made in another way than by the allocator."""
        if self._closed:
            raise InternalError(f"{name} is staged after its construction ended")
        part = make()
        self._staged.append((name, part))
        return part

    def publish(self) -> tuple[Part, ...]:
        """Hand out all owners, in the order in which they were staged; InternalError the second time."""
        if self._closed:
            raise InternalError("a construction was published twice, or after it ended")
        self._closed = True
        staged, self._staged = self._staged, []
        return tuple(part for _, part in staged)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        staged, self._staged = self._staged, []
        failed = _release([part for _, part in staged])
        if error is not None:
            if failed is not None:
                error.add_note(f"while what had been built was released: {failed}")
        elif failed is not None:
            raise failed
        elif staged:
            names = ", ".join(name for name, _ in staged)
            raise InternalError(f"a construction ended without publishing: {names}")


def release_all(owners: Sequence[Owner]) -> None:
    """Release owners in reverse order; goes on past errors, and raises the first one at the end."""
    failed = _release(owners)
    if failed is not None:
        raise failed


def _release(owners: Sequence[Owner]) -> Exception | None:
    """Release owners in reverse order and return the first error."""
    first: Exception | None = None
    for owner in reversed(owners):
        try:
            owner.release()
        except Exception as error:
            # the others must be released all the same
            first = first or error
    return first
