"""A group of processes, one for each part of a model, over torch.distributed.

On GPUs that see each other's memory, short sums are made by one kernel that reads it; longer ones are the
communication library's. On the CPU all go over local connections. This file does not know what is summed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh

from hipfire.base.errors import InternalError

# up to here one kernel that reads everything from everyone is faster than rounds of exchange
DIRECT_BYTES = 1 << 20
# the reading kernel moves 16 bytes at a time
_PIECE = 16
# how long a process waits for the others while the group comes together, and within one operation
_PATIENCE = timedelta(minutes=10)
_DIMENSION = "tp"
# how long lost processes are answered for, at most
_LET_GO_S = 10.0
# torch renamed it
_GATHER: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Shared:
    """Memory of this GPU that the others read, and what torch calls its handle."""

    memory: torch.Tensor
    handle: Any

    def let_go(self, device: torch.device) -> None:
        """Answer for lost processes until no kernel of this GPU waits for them; what they compute is void.

        A kernel waits until its own flags are set, and to set those of the others until they are cleared.
        """
        steps, until = torch.cuda.default_stream(device), time.monotonic() + _LET_GO_S
        flags = [
            self.handle.get_signal_pad(rank, dtype=torch.int32) for rank in range(self.handle.world_size)
        ]
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            while not steps.query() and time.monotonic() < until:
                for rank, each in enumerate(flags):
                    each.fill_(int(rank == self.handle.rank))
                torch.cuda.current_stream(device).synchronize()


class ProcessGroup:
    """This process's end of a group: `kernels.collective.Group`."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, shared: Shared | None = None) -> None:
        self.size: int = mesh.size()
        self.device = device
        self._group = mesh.get_group(_DIMENSION)
        self._shared = shared

    @property
    def reads_peers(self) -> bool:
        """Tell whether short sums are made by a kernel that reads the other GPUs' memory."""
        return self._shared is not None

    def direct(self, x: torch.Tensor) -> bool:
        """Tell whether `sum_into` takes x: it is short, and whole pieces that one kernel reads."""
        return self._shared is not None and x.nbytes <= DIRECT_BYTES and x.nbytes % _PIECE == 0

    def sum(self, x: torch.Tensor) -> None:
        """Replace x by the sum of all processes' x; InternalError if a process is lost."""
        with _failures():
            distributed.all_reduce(x, group=self._group)

    def sum_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of all processes' x to `out`."""
        if self._shared is None:
            raise InternalError("this group has no memory that its processes share")
        memory = self._shared.memory[: x.nbytes].view(x.dtype).view(x.shape)
        with _failures():
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(memory, x, "sum", self._group.group_name, out)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write all processes' x to `out` [size, *x.shape]."""
        with _failures():
            _GATHER(out.view(-1), x.reshape(-1), group=self._group)

    def abort(self) -> None:
        """Break off what lost processes will never take part in; the group is of no use any more.

        May be called while another thread waits for the group.
        """
        with suppress(RuntimeError, AttributeError):
            backend: Any = self._group._get_backend(self.device)
            backend.abort()
        if self._shared is not None:
            with suppress(RuntimeError, AttributeError):
                self._shared.let_go(self.device)

    def close(self) -> None:
        """Leave the group. All that was launched must be over, and graphs of it gone."""
        self._shared = None
        # a group that was broken off is left in any case
        with suppress(RuntimeError, ValueError):
            distributed.destroy_process_group()


def join(folder: Path, rank: int, size: int, device: torch.device, *, direct: bool = True) -> ProcessGroup:
    """Wait for all `size` processes that were given this private folder, and return their group.

    `direct` False leaves all sums to the library. A process is in one group at a time; InternalError if it is
    in another, or if they do not come together.
    """
    if distributed.is_initialized():
        raise InternalError("this process already shares a model with others")
    on_gpu = device.type == "cuda"
    try:
        with _failures(), _loopback():
            if on_gpu:
                torch.cuda.set_device(device)
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=FileStore(str(folder / "store"), size),
                rank=rank,
                world_size=size,
                timeout=_PATIENCE,
                device_id=device if on_gpu else None,
            )
            mesh = DeviceMesh(device.type, torch.arange(size), mesh_dim_names=(_DIMENSION,))
            if on_gpu:
                # the mesh may have chosen by its own rules
                torch.cuda.set_device(device)
            shared = _shared_memory(mesh, device) if on_gpu and direct else None
            return ProcessGroup(mesh, device, shared)
    except BaseException:
        if distributed.is_initialized():
            with suppress(RuntimeError):
                distributed.destroy_process_group()
        raise


def _shared_memory(mesh: DeviceMesh, device: torch.device) -> Shared | None:
    """Return memory that the GPUs of the group read from each other, None unless all of them can."""
    shared: Shared | None = None
    group = mesh.get_group(_DIMENSION)
    try:
        # no part of torch's stable interface: where it is missing or refuses, the library makes the sums
        from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 - not in every build

        memory = symmetric.empty(DIRECT_BYTES, dtype=torch.uint8, device=device)
        shared = Shared(memory, symmetric.rendezvous(memory, group))
        ones, out = torch.ones(256, device=device), torch.empty(256, device=device)
        ProcessGroup(mesh, device, shared).sum_into(ones, out)
        works = bool((out == mesh.size()).all())
    except (ImportError, AttributeError, TypeError, RuntimeError, InternalError):
        works = False
    everywhere = torch.tensor(int(works), device=device)
    distributed.all_reduce(everywhere, distributed.ReduceOp.MIN, group=group)
    return shared if bool(everywhere) else None


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what torch raises into one line."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InternalError(f"processes that share a model lost each other: {line}") from error


@contextmanager
def _loopback() -> Iterator[None]:
    """Keep connections between processes of this machine on it: the library asks the environment for that."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ.setdefault(name, "lo")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
