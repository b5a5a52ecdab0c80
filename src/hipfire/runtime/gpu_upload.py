"""Bytes of a mapped file on their way to a GPU: through pinned memory, a piece at a time.

While the GPU takes in one piece and works on it, the next one is read from the file. This file does not know
what the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# two pieces are under way at a time
PIECE_BYTES = 32 << 20


class Upload:
    """Two buffers of `piece` bytes, each with its twin on the device; `progress` is told of bytes copied."""

    def __init__(
        self,
        device: torch.device,
        *,
        piece: int = PIECE_BYTES,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        pinned = device.type == "cuda"
        self._host = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._device = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(2)]
        self._done: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._progress = progress

    def pieces(self, data: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the rows of uint8 `data` [rows, n] on the device, a few at a time: (first, uint8 [few, n]).

        What is yielded may be read by launches that are started before the next piece is asked for. A row
        must fit into a piece.
        """
        rows, width = data.shape
        step = max(1, self._host[0].numel() // max(1, width))
        for first in range(0, rows, step):
            part = data[first : first + step]
            yield first, self._send(part.reshape(-1)).view(part.shape[0], width)

    def passed(self, nbytes: int) -> None:
        """Count bytes that were read; callers tell here of those that go another way."""
        if self._progress is not None:
            self._progress(nbytes)

    def _send(self, part: torch.Tensor) -> torch.Tensor:
        turn = self._turn
        self._turn = 1 - turn
        waiting = self._done[turn]
        if waiting is not None:
            # until the copy two turns ago has been made, its source is still being read
            waiting.synchronize()
        host, target = self._host[turn][: part.numel()], self._device[turn][: part.numel()]
        host.copy_(part)
        target.copy_(host, non_blocking=True)
        if target.is_cuda:
            # what is launched on a piece is in front of the next copy into its memory, on the same stream
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._done[turn] = event
        self.passed(part.numel())
        return target
