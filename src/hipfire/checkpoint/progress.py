"""What long transfers report while they run. This file does not know how a terminal shows it."""

from __future__ import annotations

from typing import Protocol


class TransferProgress(Protocol):
    """Receives the progress of downloads, one file after the other."""

    def start(self, label: str, total: int | None) -> None:
        """A transfer begins; `total` is its size in bytes, None where the server does not say."""

    def update(self, done: int, total: int | None) -> None:
        """`done` bytes are on disk; never falls within one transfer."""

    def rename(self, label: str) -> None:
        """The transfer goes on under another label; a display that draws no live bar need not show it."""

    def note(self, line: str) -> None:
        """Something that the user should read, such as a retry and its reason."""

    def finish(self) -> None:
        """The transfer ended, well or not."""
