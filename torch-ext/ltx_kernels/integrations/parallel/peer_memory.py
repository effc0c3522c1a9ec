"""Exchange of tokens between GPUs of one host that reach each other's memory, by copies instead of collectives.

torch.distributed's symmetric memory maps a buffer of every rank into all of them. A rank writes the heads of query, key
and value straight into the buffers of the ranks that attend to them, and reads its rows of the outputs straight from
there. Nothing is packed before, and nothing is put in order after: the copy that reorders is the exchange.

Where this is not possible, `peers_of` keeps the reason, and attention.py uses collectives. All ranks decide alike.
"""

from __future__ import annotations

import contextlib
import os
import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch_private import symmetric_memory
from ..engine.guards import is_capturing

OFF = "LTX_KERNELS_PEER_MEMORY"  # the variable of the environment that turns it off, as 0
BOOT = Path("/proc/sys/kernel/random/boot_id")
TIMEOUT_MS = 600_000  # until a rank gives the others up, as NCCL's default
WIDE = torch.complex128  # 16 bytes, the most that a thread of torch's copies moves at once
PARTS = 4  # query, key, value, output


@dataclass(frozen=True)
class Window:
    """A buffer of every rank that all ranks can write and read.

    parts: The buffers, uint8, in the order of the ranks.
    barrier: Waits for all ranks, on a GPU in the order of the current stream. What any of them wrote before is there
        after.
    """

    parts: Sequence[Tensor]
    barrier: Callable[[], None]


class Peers:
    """The ranks of a group, with their window.

    An attention needs two barriers, and these also keep the ranks from overwriting what another one still reads. The
    barrier before outputs are read comes after every rank's attention, so that the next query may be written. The
    barrier after the next query is written comes after every rank has read its outputs.
    """

    def __init__(self, window: Window, rank: int, device: torch.device) -> None:
        self.window, self.rank, self.size, self.device = window, rank, len(window.parts), device
        self.stream: Any = None  # of the last exchange
        # With a high priority, copies to others begin while the norm of query and key still has blocks to start.
        self.side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """A stream beside the current one, for work that follows all that this one has been given."""
        if self.side is None:
            return contextlib.nullcontext()
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.side)

    def join(self) -> None:
        """Has the current stream wait for the one beside it."""
        if self.side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    def follow_stream(self) -> None:
        """Keeps the exchanges in order: the current stream waits for the stream of the last exchange."""
        if self.side is None:
            return
        current = torch.cuda.current_stream(self.device)
        if self.stream is not None and self.stream != current:
            current.wait_stream(self.stream)
        self.stream = current


class Transfer:
    """One self-attention's exchange of query, key, value and output. Every rank makes it with the same shape."""

    def __init__(self, peers: Peers, like: Tensor) -> None:
        """like: One of the tensors [B, S, heads, D] of this rank's tokens."""
        batch, tokens, heads, width = like.shape
        shape = (batch, peers.size, tokens, heads // peers.size, width)
        peers.follow_stream()
        self.peers = peers
        self.own: list[tuple[int, Tensor]] = []  # heads of this rank, which are copied when all others are on their way
        # Outputs lie at the end. With tensors of any size, they lie after the query, key and value of another call.
        parts = peers.window.parts
        self.inputs = [part[: 3 * like.nbytes].view(like.dtype).view(3, *shape) for part in parts]
        self.outputs = [part[part.nbytes - like.nbytes :].view(like.dtype).view(shape) for part in parts]

    def put(self, part: int, x: Tensor) -> None:
        """Begins to write query, key or value (`part` 0, 1 or 2), [B, S, heads, D], to the ranks of its heads."""
        peers, heads = self.peers, x.unflatten(2, (self.peers.size, -1))
        with peers.beside():
            for other in self._others():
                copy(self.inputs[other][part, :, peers.rank], heads[:, :, other])
        self.own.append((part, heads[:, :, peers.rank]))

    def wait(self) -> tuple[Tensor, ...]:
        """Query, key and value of all ranks' tokens, [B, all S, heads / ranks, D], once all ranks have put them."""
        for part, heads in self.own:
            copy(self.inputs[self.peers.rank][part, :, self.peers.rank], heads)
        self.peers.join()
        self.peers.window.barrier()
        return self.inputs[self.peers.rank].flatten(2, 3).unbind()

    @property
    def output(self) -> Tensor:
        """Where the attention has to be written, [B, all S, heads / ranks, D]."""
        return self.outputs[self.peers.rank].flatten(1, 2)

    def take(self, out: Tensor) -> Tensor:
        """Reads the outputs of this rank's tokens from all ranks into `out`, [B, S, heads, D]."""
        peers, heads = self.peers, out.unflatten(2, (self.peers.size, -1))
        with peers.beside():
            copy(heads[:, :, peers.rank], self.outputs[peers.rank][:, peers.rank])
        peers.window.barrier()
        for other in self._others():
            copy(heads[:, :, other], self.outputs[other][:, peers.rank])
        peers.join()
        return out

    def _others(self) -> list[int]:
        """The other ranks, beginning with the next, so that not all ranks write to the same one at a time."""
        return [(self.peers.rank + i) % self.peers.size for i in range(1, self.peers.size)]


def copy(target: Tensor, source: Tensor) -> None:
    """target.copy_(source) between different strides, 16 bytes at a time where both divide into them."""
    if target.dtype == source.dtype:
        target, source = wide(target, source)
    target.copy_(source)


def wide(*tensors: Tensor) -> Sequence[Tensor]:
    """The same memory in elements of 16 bytes, where all of the tensors divide into them.

    torch copies between different strides element by element and computes where each lies.
    """
    if torch.compiler.is_compiling():  # its copies are kernels of its own
        return tensors
    for x in tensors:
        steps = (x.data_ptr(), *(x.element_size() * step for step in (x.shape[-1], *x.stride()[:-1])))
        if x.stride(-1) != 1 or any(step % WIDE.itemsize for step in steps):
            return tensors
    return [x.view(WIDE) for x in tensors]


# ---- Which ranks reach each other's memory

_known: weakref.WeakKeyDictionary[Any, Peers | str] = weakref.WeakKeyDictionary()  # by group; a str says why not


def peers_of(group: Any, like: Tensor) -> Peers | None:
    """The ranks of a group with a window for such tensors [B, S, heads, D]; None where collectives are used.

    Every rank has to call it, with the same shape. The first call for a group, and a call with larger tensors than
    before, wait for all ranks.
    """
    known = _known.get(group)
    needed = PARTS * like.nbytes
    if like.nbytes % WIDE.itemsize:
        return None
    if known is None or (isinstance(known, Peers) and known.window.parts[0].nbytes < needed):
        if is_capturing():
            return None
        known = _known[group] = _join(group, like.device, needed)
    return None if isinstance(known, str) else known


def line(group: Any) -> str:
    """What the report says of a group's exchanges; empty before the first."""
    known = _known.get(group)
    if known is None:
        return ""
    return f"collectives, since {known}" if isinstance(known, str) else "copies between the GPUs' memories"


def _join(group: Any, device: torch.device, nbytes: int) -> Peers | str:
    """The ranks with a window of so many bytes, or the reason why they have none. It is the same on every rank."""
    host = platform.node(), BOOT.read_text() if BOOT.exists() else ""
    reasons, hosts = zip(*_of_all(group, (why_not(device), host)))
    if any(reasons):
        return next(filter(None, reasons))
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    reason = ""
    try:
        with torch.inference_mode(False):
            window = make_window(group, device, nbytes)
            reason = _why_wrong(window, dist.get_rank(group))
    except (AttributeError, ImportError, RuntimeError) as error:
        reason = f"symmetric memory failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
    reason = next(filter(None, _of_all(group, reason)), "")
    return reason or Peers(window, dist.get_rank(group), device)


def _of_all(group: Any, value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def why_not(device: torch.device) -> str:
    """Why a rank cannot reach the memory of others; empty if it may."""
    if os.environ.get(OFF) == "0":
        return f"{OFF} is 0"
    if device.type != "cuda":
        return f"the device is {device.type}"
    count = torch.cuda.device_count()
    if not all(torch.cuda.can_device_access_peer(device, other) for other in range(count) if other != device.index):
        return "a GPU does not reach another one's memory"
    return ""


def make_window(group: Any, device: torch.device, nbytes: int) -> Window:
    """A window in torch.distributed's symmetric memory. Every rank of the group has to call it."""
    home = symmetric_memory()
    memory = home.empty(nbytes, dtype=torch.uint8, device=device)
    handle = home.rendezvous(memory, group.group_name)
    mapped = getattr(handle, "get_remote_tensor", handle.get_buffer)  # of newer torch: of a tensor, not of its buffer
    parts = [mapped(rank, (nbytes,), torch.uint8) for rank in range(handle.world_size)]
    parts[handle.rank] = memory

    def barrier() -> None:
        handle.barrier(timeout_ms=TIMEOUT_MS)

    return Window(parts, barrier)


def _why_wrong(window: Window, rank: int) -> str:
    """Why a new window is of no use: every rank writes its number to all, and reads all of them."""
    for part in window.parts:
        part[rank].fill_(rank + 1)
    window.barrier()
    size = len(window.parts)
    seen = [part[:size].tolist() for part in window.parts]
    return "" if seen == [list(range(1, size + 1))] * size else f"symmetric memory held {seen}"
