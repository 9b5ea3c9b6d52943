"""Scratch memory of the kernels: one allocation, named regions, no surprise in mid-step.

An engine plans: :func:`workspace_specs` says what the largest step needs, :func:`planned_bytes` how
many bytes that is before anything is allocated, and ``Workspace(specs, device)`` holds just that;
asking it for more is a :class:`WorkspaceError`. Without specs a workspace grows on demand, until
:meth:`Workspace.locked`. A call without a workspace gets one per device and stream.

Three things make sharing memory between launches safe:

- Order. Regions are reused by the next call on the same stream, after this one. A workspace is
  therefore bound to the stream that uses it first; another stream is an error. A capturing stream
  is not counted, since a graph is ordered where it is replayed.
- One call at a time. A call holds the workspace from the first region that it asks for to its last
  launch, so that two threads on one stream do not interleave their kernels.
- Addresses in graphs. What was used during a capture is never freed while the workspace lives:
  growth puts the old allocation aside. So a workspace must outlive its graphs. The default
  workspaces need no such care: during a capture a fresh one is taken from the graph's pool.

Contents are garbage: whoever asks for a region writes it before reading it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import prod
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from kda_jit.errors import DeviceError, InputError, InputTypeError, WorkspaceError

#: Bytes of one stage image of the CUDA kernels: one chunk of one value head, K = V = 128. It is
#: kStageBytes of kernels_src/common/stage.cuh; a compile test holds the two equal.
STAGE_BYTES = 27264
#: Tokens of one stage image (kChunk there).
STAGE_TOKENS = 32
#: Head size for which the CUDA kernels, and so their stage images, exist.
STAGE_HEAD_DIM = 128
#: Most bytes that the flags of a pipelined schedule take, whatever the sizes of the call.
PIPELINE_FLAG_BYTES = 64 << 10
#: Every region starts at a multiple of this many bytes.
ALIGNMENT = 256
#: An unplanned workspace grows in steps of this many bytes.
GROWTH_STEP = 2 << 20

#: ``allocator(nbytes, device)`` returns a one-dimensional uint8 tensor of at least nbytes.
Allocator = Callable[[int, torch.device], Tensor]


class Spec(NamedTuple):
    """What a region holds at most."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def stage_slots(num_tokens: int, num_seqs: int, *, checkpoints: bool = True) -> int:
    """Stage images per value head that a step can need, whatever the lengths of its sequences.

    Sequence n owns the slots from ``start // 32 + n`` on (``+ 2 n`` with checkpoints, each of which
    may end a chunk early), so that the device needs no prefix sum and the host no lengths. For a
    dense batch pass B * T tokens and B sequences.
    """
    return num_tokens // STAGE_TOKENS + (2 if checkpoints else 1) * num_seqs


def workspace_specs(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    checkpoints: bool = True,
) -> dict[str, Spec]:
    """Regions that :func:`kda_jit.prefill` needs at most, by name, for any backend.

    max_num_batched_tokens   tokens of one call, all sequences together (padded rows included)
    max_num_seqs             sequences of one call
    num_heads                value heads (HV) of this rank
    head_dim                 the larger of K and V
    dtype                    of q, k, v
    checkpoints              whether a call may pass checkpoint_state

    The plan is enough for the CUDA and the Triton backend; the torch backend needs none. Give it to
    :class:`Workspace`, or its shapes to an engine's own manager.
    """
    for name, value in (
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("max_num_seqs", max_num_seqs),
        ("num_heads", num_heads),
        ("head_dim", head_dim),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputTypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}.")
        if value < 1:
            raise InputError(f"{name}: expected at least 1, got {value}.")
    slots = stage_slots(max_num_batched_tokens, max_num_seqs, checkpoints=checkpoints)
    nbytes = slots * num_heads * _stage_bytes(head_dim, dtype)
    return {
        "prefill_stages": Spec((nbytes,), torch.uint8),
        "pipeline_flags": Spec((PIPELINE_FLAG_BYTES,), torch.uint8),
    }


def _stage_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes for 32 tokens of a value head on whichever backend needs more.

    The Triton kernels keep, for 16 tokens, three [16, K] matrices, one [16, 16] and K fp32 decays,
    in half precision for 16-bit inputs, with K padded to a power of two.
    """
    padded = max(16, 1 << (head_dim - 1).bit_length())
    size = 4 if dtype.itemsize > 2 else 2
    triton = (STAGE_TOKENS // 16) * ((3 * 16 * padded + 16 * 16) * size + 4 * padded)
    return max(triton, STAGE_BYTES) if head_dim == STAGE_HEAD_DIM else triton


def planned_bytes(specs: Mapping[str, Spec]) -> int:
    """Bytes that ``Workspace(specs, device)`` allocates: aligned regions, slack for the base."""
    return _total([Spec(*spec).nbytes for spec in specs.values()])


class Workspace:
    """One allocation, many regions, each at a 256-byte boundary and apart from the others.

    specs       the plan: regions and their largest sizes, allocated now; None: grow on demand
    device      where; None: the device of the first call
    allocator   replaces ``torch.empty``, for instance by an engine's own pool or a test's redzones

    A backend calls ``address``, ``get`` or ``view``, between the ``acquire`` and ``release`` (or
    inside the ``in_use``) of whoever runs it, such as kda_jit.prefill.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec] | None = None,
        device: torch.device | str | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        self._device = None if device is None else _indexed(torch.device(device))
        self._allocator = allocator or _torch_empty
        self._planned = None if specs is None else {k: Spec(*s).nbytes for k, s in specs.items()}
        self._regions: dict[str, tuple[int, int]] = {}  # name -> (address, bytes)
        self._buffer: Tensor | None = None
        self._outgrown: list[Tensor] = []  # of the call in progress, whose launches may be to come
        self._retired: list[Tensor] = []  # their addresses live on in captured graphs
        self._captured = False  # the current allocation has been in use during a capture
        self._stream: int | None = None
        self._locks = 0
        self._mutex = threading.RLock()
        if self._planned is not None and self._device is not None:
            self._allocate(self._planned, "Workspace")

    @classmethod
    def on(cls, memory: Tensor, specs: Mapping[str, Spec], *, hint: str = "") -> Workspace:
        """A planned workspace in memory of the caller's, which is neither grown nor freed.

        memory   a contiguous tensor of any shape and dtype, of `planned_bytes(specs)` or more
        hint     how to get a tensor that is large enough, for the error's text

        Whoever lends one tensor twice keeps the calls apart: each workspace orders its own only.
        """
        if not isinstance(memory, Tensor):
            raise InputTypeError(
                f"workspace: expected a contiguous tensor, got {type(memory).__name__}."
            )
        if not memory.is_contiguous():
            raise InputError(
                f"workspace: expected a contiguous tensor, got strides {tuple(memory.stride())} "
                f"for shape {list(memory.shape)}."
            )
        needed = planned_bytes(specs)
        if memory.nbytes < needed:
            raise WorkspaceError(
                f"workspace: expected a tensor of at least {needed} bytes, got {memory.nbytes}. "
                f"{hint}".rstrip()
            )
        if memory.dtype is not torch.uint8 or memory.dim() != 1:
            memory = memory.view(-1).view(torch.uint8)
        return cls(specs, memory.device, lambda nbytes, device: memory)

    # -- facts -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """None until the first use of a workspace built without one."""
        return self._device

    @property
    def nbytes(self) -> int:
        """Bytes held now, those kept for captured graphs included."""
        held = [x.nbytes for x in (*self._retired, *self._outgrown)]
        return sum(held) + (0 if self._buffer is None else self._buffer.nbytes)

    @property
    def is_locked(self) -> bool:
        return self._locks > 0

    def __repr__(self) -> str:
        regions = ", ".join(f"{name}={size}" for name, (_, size) in self._regions.items())
        state = "planned" if self._planned is not None else "growing"
        return f"Workspace({self._device}, {self.nbytes} bytes, {state}: {regions or 'empty'})"

    # -- what the owner does ---------------------------------------------------------------------

    def reserve(self, sizes: Mapping[str, int], *, caller: str = "reserve") -> None:
        """Makes room for all these regions (name -> bytes) at once. Never shrinks one."""
        with self._mutex:
            if any(self._regions.get(n, (0, -1))[1] < size for n, size in sizes.items()):
                self._make_room(sizes, caller)

    def locked(self) -> AbstractContextManager[None]:
        """Forbids growth from now on; as ``with workspace.locked():``, until the block ends."""
        self._locks += 1
        return _Unlock(self)

    def lane(self, index: int, *, caller: str = "lane") -> Workspace:
        """This workspace, the only lane there is; see `WorkspaceLanes`."""
        return _pick_lane((self,), index, caller)

    # -- what api and backends do ----------------------------------------------------------------

    def acquire(self, device: torch.device, stream: int, capturing: bool) -> None:
        """Takes the workspace for one call: until ``release``, other threads wait.

        device     of the tensors; must be this workspace's, or becomes it
        stream     raw handle of the stream of all the launches to come
        capturing  whether that stream is being captured into a CUDA graph

        Raises DeviceError or WorkspaceError (bound to another stream), then without taking it.
        """
        self._mutex.acquire()
        try:
            if device != self._device:
                self._bind(device)
            if capturing or stream != self._stream:
                self._use(stream, capturing)
        except BaseException:
            self._mutex.release()
            raise

    def release(self) -> None:
        """Ends ``acquire``, after the last launch that uses a region."""
        # What was outgrown meanwhile is in use by launches that are all enqueued by now; torch
        # reuses its memory after them, in the order of the stream.
        self._outgrown.clear()
        self._mutex.release()

    @contextmanager
    def in_use(self, device: torch.device) -> Iterator[Workspace]:
        """``acquire`` for the current stream of ``device``, and ``release``."""
        self.acquire(device, current_stream(device), is_capturing())
        try:
            yield self
        finally:
            self.release()

    def address(self, name: str, nbytes: int, *, caller: str, stream: int | None = None) -> int:
        """Address of a region of at least nbytes, aligned to 256.

        caller   who asks, for the error's text
        stream   raw handle of the stream that will use it; needed only without ``acquire``
        """
        if stream is not None and stream != self._stream:
            self._use(stream, is_capturing())
        region = self._regions.get(name)
        if region is None or region[1] < nbytes:
            with self._mutex:
                self._make_room({name: nbytes}, caller)
                region = self._regions[name]
        return region[0]

    def get(self, name: str, nbytes: int, *, caller: str) -> Tensor:
        """The same as a uint8 tensor [nbytes], a view of the one allocation."""
        address = self.address(name, nbytes, caller=caller)
        assert self._buffer is not None
        return self._buffer.narrow(0, address - self._buffer.data_ptr(), nbytes)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, caller: str) -> Tensor:
        """The same as a dense tensor of this shape and dtype."""
        return self.get(name, Spec(shape, dtype).nbytes, caller=caller).view(dtype).view(shape)

    # -- inside ----------------------------------------------------------------------------------

    def _make_room(self, sizes: Mapping[str, int], caller: str) -> None:
        """Grows to hold these regions besides those there are, or says why it must not."""
        if self._planned is not None:
            for name, size in sizes.items():
                if size > self._planned.get(name, -1):
                    plan = self._planned.get(name)
                    raise WorkspaceError(
                        f"workspace: expected {caller} to stay within the plan, got a request for "
                        f"{size} bytes of {name!r}, planned: {'none' if plan is None else plan}. "
                        "Plan for more tokens, sequences or heads in workspace_specs."
                    )
        held = {name: size for name, (_, size) in self._regions.items()}
        wanted = {**held, **{n: max(s, held.get(n, 0)) for n, s in sizes.items()}}
        asked = ", ".join(f"{size} bytes of {name!r}" for name, size in sizes.items())
        if self._locks:
            current = ", ".join(f"{held.get(name, 0)}" for name in sizes)
            raise WorkspaceError(
                f"workspace: expected no growth while locked, got a request by {caller} for "
                f"{asked}; it holds {current}. Reserve what the largest step needs before locking."
            )
        if is_capturing():
            raise WorkspaceError(
                f"workspace: expected no growth during a CUDA graph capture, got a request by "
                f"{caller} for {asked}. Call reserve() or run the largest shape once before."
            )
        self._allocate(wanted if self._planned is None else self._planned, caller)

    def _allocate(self, sizes: Mapping[str, int], caller: str) -> None:
        total = _total(list(sizes.values()))
        if self._planned is None:
            total = -(-total // GROWTH_STEP) * GROWTH_STEP
        if self._device is None:
            raise WorkspaceError(
                f"workspace: expected a device before {caller} asks for memory, got None. Pass "
                "device= to Workspace."
            )
        # The old allocation is alive until the new one is there, so they never overlap.
        buffer = self._allocator(total, self._device)
        if self._buffer is not None:
            (self._retired if self._captured else self._outgrown).append(self._buffer)
        base = buffer.data_ptr()
        address = -(-base // ALIGNMENT) * ALIGNMENT
        regions = {}
        for name, size in sizes.items():
            regions[name] = (address, size)
            address += -(-size // ALIGNMENT) * ALIGNMENT
        if address > base + buffer.nbytes:
            raise WorkspaceError(
                f"workspace: expected the allocator to return {total} bytes, got {buffer.nbytes}."
            )
        self._buffer, self._regions, self._captured = buffer, regions, False

    def _bind(self, device: torch.device) -> None:
        device = _indexed(device)
        if self._device is None:
            self._device = device
            if self._planned is not None:
                self._allocate(self._planned, "Workspace")
        elif self._device != device:
            raise DeviceError(
                f"workspace: expected one on {device}, where q is, got one on {self._device}."
            )

    def _use(self, stream: int, capturing: bool) -> None:
        if capturing:
            self._captured = True
            return
        if self._stream is not None:
            raise WorkspaceError(
                f"workspace: expected calls on stream {self._stream:#x}, which uses it already, "
                f"got one on stream {stream:#x}. Kernels of two streams would overwrite each "
                "other's scratch: build one Workspace per stream, or pass workspace=None."
            )
        self._stream = stream


class WorkspaceLanes:
    """Workspaces of one plan, for work that is in flight at the same time: all allocated now.

    A lane belongs to one stream, or to one of the micro-batches that take turns on a stream. Work
    in different lanes never meets; within a lane it is ordered as in any workspace.

    specs, device, allocator   of each lane, as for :class:`Workspace`
    lanes                      how many

    They take ``lanes * planned_bytes(specs)`` bytes.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec],
        device: torch.device | str,
        lanes: int = 1,
        allocator: Allocator | None = None,
    ) -> None:
        if isinstance(lanes, bool) or not isinstance(lanes, int):
            raise InputTypeError(f"lanes: expected an int, got {type(lanes).__name__} {lanes!r}.")
        if lanes < 1:
            raise InputError(f"lanes: expected at least 1, got {lanes}.")
        self._lanes = tuple(Workspace(specs, device, allocator) for _ in range(lanes))

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def device(self) -> torch.device | None:
        return self._lanes[0].device

    @property
    def nbytes(self) -> int:
        """Bytes held by all lanes together."""
        return sum(lane.nbytes for lane in self._lanes)

    def lane(self, index: int, *, caller: str = "lane") -> Workspace:
        """The workspace of one lane; a WorkspaceError names the caller where it was not planned."""
        return _pick_lane(self._lanes, index, caller)

    def reserve(self, sizes: Mapping[str, int], *, caller: str = "reserve") -> None:
        """`Workspace.reserve` on every lane."""
        for lane in self._lanes:
            lane.reserve(sizes, caller=caller)


def _pick_lane(lanes: tuple[Workspace, ...], index: int, caller: str) -> Workspace:
    if not 0 <= index < len(lanes):
        raise WorkspaceError(
            f"workspace: expected {caller} to use one of the lanes planned, {len(lanes)}, counted "
            f"from 0, got lane {index}. Plan one lane per stream or micro-batch in WorkspaceLanes."
        )
    return lanes[index]


class _Unlock(AbstractContextManager[None]):
    __slots__ = ("_workspace",)

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._workspace._locks -= 1


# -- the default workspaces ----------------------------------------------------------------------

_defaults: dict[tuple[torch.device, int], Workspace] = {}
_defaults_mutex = threading.Lock()


def default_workspace(device: torch.device, stream: int, capturing: bool = False) -> Workspace:
    """The workspace of calls that bring none, one per device and stream (raw handle).

    During a CUDA graph capture it is a fresh one, whose memory comes from the graph's pool and goes
    back to it, so that no graph ever holds an address of a workspace that may grow.
    """
    if capturing:
        return _CaptureWorkspace(device=device)
    found = _defaults.get((device, stream))
    if found is None:
        with _defaults_mutex:
            found = _defaults.setdefault((device, stream), Workspace(device=device))
    return found


def release_default_workspaces() -> int:
    """Gives the memory of the default workspaces back to torch; returns how many bytes."""
    with _defaults_mutex:
        freed = sum(w.nbytes for w in _defaults.values())
        _defaults.clear()
    return freed


class _CaptureWorkspace(Workspace):
    """Lives for one call inside a capture, so it may allocate there."""

    def _make_room(self, sizes: Mapping[str, int], caller: str) -> None:
        held = {name: size for name, (_, size) in self._regions.items()}
        self._allocate({**held, **sizes}, caller)


def _forget_parent() -> None:
    """A forked child has neither its parent's CUDA memory nor the threads that hold its locks."""
    global _defaults_mutex
    _defaults_mutex = threading.Lock()
    _defaults.clear()


os.register_at_fork(after_in_child=_forget_parent)


# -- small things --------------------------------------------------------------------------------


def _total(sizes: list[int]) -> int:
    """Bytes of one allocation for regions of these sizes, whatever the alignment of its base."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) + ALIGNMENT


def _indexed(device: torch.device) -> torch.device:
    """A bare "cuda" means the current device; an index keeps it from meaning another one later."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _torch_empty(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def current_stream(device: torch.device) -> int:
    """Raw handle of torch's current stream on ``device``; 0 (the default stream) off the GPU."""
    if device.type != "cuda":
        return 0
    # A fifth of the time of torch.cuda.current_stream(device).cuda_stream; Triton uses it too.
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def is_capturing() -> bool:
    """Whether the current stream of the current device is being captured into a CUDA graph."""
    initialized: bool = torch.cuda.is_initialized()
    return initialized and torch.cuda.is_current_stream_capturing()
