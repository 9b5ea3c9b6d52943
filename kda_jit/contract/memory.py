"""Where tensors lie in memory: ranges of addresses, overlap, alignment."""

from __future__ import annotations

from torch import Tensor

from kda_jit.errors import InputError

#: Bytes to which the CUDA backend wants pointers and strides aligned. Not an input error: the
#: tensors that miss it are listed in ``KdaProblem.misaligned`` and a backend may reject them.
ALIGNMENT = 16

#: Bytes from the first to the last, and the strides in bytes that should be aligned, or-ed.
Extent = tuple[int, int]
NOWHERE: Extent = (0, 0)


def check_aliasing(written: dict[str, Tensor | None], read: dict[str, Tensor | None]) -> None:
    """What is written shares no element with the rest, but final_state may be initial_state."""
    others = {name: x for name, x in read.items() if x is not None and x.numel()}
    for name, x in written.items():
        if x is None or not x.numel():
            continue
        for other_name, other in others.items():
            start, end = address_range(x)
            other_start, other_end = address_range(other)
            if other_start < end and start < other_end:
                _refuse_overlap(name, x, other_name, other)
        others[name] = x


def check_scratch(memory: Tensor, others: dict[str, Tensor | None]) -> None:
    """Scratch memory shares no byte with any argument: kernels write it while they read those."""
    start = memory.data_ptr()
    end = start + memory.nbytes
    for name, x in others.items():
        if x is None or x.numel() == 0:
            continue
        first = x.data_ptr()
        if first >= end:
            continue
        last = first + x.nbytes if x.is_contiguous() else address_range(x)[1]
        if last > start:
            raise InputError(
                f"workspace: expected memory apart from {name}, got overlapping ranges of "
                "addresses. Kernels write it while they read and write the arguments."
            )


def address_range(x: Tensor) -> tuple[int, int]:
    """First byte, and the end of the last one; the same for a tensor without elements."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _refuse_overlap(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raises unless the two, whose address ranges meet, are known to share no element."""
    if _interleaved(x, other):
        return
    if (name, other_name) == ("final_state", "initial_state"):
        if same_view(x, other):
            return
        raise InputError(
            "final_state: expected memory apart from initial_state, or exactly initial_state (same "
            "address, shape, strides and dtype) to update it in place, got a partial overlap of "
            f"{abs(x.data_ptr() - other.data_ptr())} bytes offset."
        )
    raise InputError(
        f"{name}: expected memory apart from {other_name}, got overlapping ranges of addresses. "
        f"{name} is written while {other_name} is in use; pass another buffer."
    )


def _interleaved(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are disjoint columns of one wider row-major matrix.

    Rows are tokens for [B, T, ...] tensors and slots for states: column slices of one projection
    lie in one address range and share no element. False also where that cannot be told.
    """
    row_a, width_a = _rows(a)
    row_b, width_b = _rows(b)
    if row_a != row_b or row_a == 0:
        return False
    offset = (b.data_ptr() - a.data_ptr()) % row_a
    return offset >= width_a and offset + width_b <= row_a


def _rows(x: Tensor) -> tuple[int, int]:
    """(bytes from row to row, bytes used in a row); (0, 0) if x is not a stack of equal rows."""
    size = x.element_size()
    strides = x.stride()
    # The longest dense tail is the row; whatever is left must be made of whole rows.
    axis = x.dim()
    width = 1
    while axis > 0 and (x.shape[axis - 1] == 1 or strides[axis - 1] == width):
        width *= x.shape[axis - 1]
        axis -= 1
    outer = [strides[i] for i in range(axis) if x.shape[i] > 1]
    if not outer or outer[-1] == 0 or any(s % outer[-1] for s in outer):
        return 0, 0
    return outer[-1] * size, width * size


def same_view(a: object, b: object) -> bool:
    return a is b or (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype is b.dtype
        and a.device == b.device
    )


def misaligned_names(tensors: dict[str, Tensor | None]) -> tuple[str, ...]:
    """Names of the tensors whose address or outer strides are no multiple of ``ALIGNMENT``.

    A contiguous tensor is judged by its address alone: with the 128 channels that the CUDA
    backend asks for, its strides are multiples of 16 bytes by construction. Strides of axes of
    size 1 are never followed, so they do not count.
    """
    mask = ALIGNMENT - 1
    bad = []
    for name, x in tensors.items():
        if x is None or x.numel() == 0:
            continue
        outer = 1 if name.endswith("state") else 2
        strided = not x.is_contiguous() and any(
            x.shape[i] > 1 and x.stride(i) * x.element_size() & mask for i in range(outer)
        )
        if x.data_ptr() & mask or strided:
            bad.append(name)
    return tuple(bad)
