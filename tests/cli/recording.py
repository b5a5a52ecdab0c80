"""A transfer display that records, and transfers that do not wait."""

from __future__ import annotations

import requests

from hipfire.checkpoint.fetch import Policy, Transfer


class Recorder:
    """Keeps everything that a transfer reports."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.positions: list[int] = []
        self.notes: list[str] = []
        self.finished = 0

    def start(self, label: str, total: int | None) -> None:
        self.labels.append(label)

    def update(self, done: int, total: int | None) -> None:
        self.positions.append(done)

    def rename(self, label: str) -> None:
        self.labels.append(label)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def finish(self) -> None:
        self.finished += 1


def make_transfer(*, attempts: int = 3, waits: list[float] | None = None) -> tuple[Transfer, Recorder]:
    """Return a transfer over a plain session, and its recorder; waits are recorded instead of slept."""
    recorder = Recorder()
    record = (waits if waits is not None else []).append
    return Transfer(recorder, requests.Session(), Policy(attempts=attempts, sleep=record)), recorder
