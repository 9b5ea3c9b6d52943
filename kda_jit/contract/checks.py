"""The checks of one argument each, and of the contents of those that the host can see."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from numbers import Real

import torch
from torch import Tensor

from kda_jit.contract.memory import Extent, address_range, same_view
from kda_jit.contract.words import (
    kind_of,
    refuse_device,
    refuse_dtype,
    refuse_shape,
    refuse_stride,
)
from kda_jit.errors import DeviceError, GradError, InputError, InputTypeError

#: Checkpoint offsets are multiples of this many tokens (all backends, all schedules).
CHECKPOINT_GRANULE = 16
#: The lowest legal ``lower_bound`` of the bounded gate; the highest is 0, excluded.
LOWEST_BOUND = -5.0
#: The largest ``scale``: kernels take it as a float32.
LARGEST = float(torch.finfo(torch.float32).max)

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
_STATE_DTYPES = (torch.float32, torch.bfloat16)


def check_tokens(
    name: str, x: Tensor, shape: tuple[int, ...], axes: str, index: int, written: bool = False
) -> Extent:
    """A per-token tensor: [B, T, heads, channels] or [B, T, heads], dense inside a token.

    Token and batch strides are free, so that a column slice of one wide projection is legal. A
    tensor that is written must not visit an element twice either.
    """
    if not isinstance(x, Tensor) or x.shape != shape:
        refuse_shape(name, x, axes, shape)
    if x.get_device() != index:
        refuse_device(name, x, index)
    if x.is_contiguous():
        return x.nbytes, 0
    strides = x.stride()
    width = shape[2] if len(shape) == 3 else shape[2] * shape[3]
    if strides[-1] != 1 or (len(shape) == 4 and strides[2] != shape[3]):
        check_dense(name, x, 2, f"Only tokens may lie apart in {axes}.")
    batches, tokens = shape[0], shape[1]
    batch_stride, token_stride = strides[0], strides[1]
    if tokens > 1 and token_stride < width:
        refuse_stride(name, x, f"stride(1) >= {width}", "Tokens must not overlap.")
    if written and batches > 1:
        by_batch = batch_stride >= (tokens - 1) * token_stride + width
        by_token = batch_stride >= width and (
            tokens == 1 or token_stride >= (batches - 1) * batch_stride + width
        )
        if not (by_batch or by_token):
            refuse_stride(name, x, "no element twice", "It is written, so it must not overlap.")
    size = x.element_size()
    last = (batches - 1) * batch_stride + (tokens - 1) * token_stride + width
    return last * size, (batch_stride | token_stride) * size


def check_dense(name: str, x: Tensor, first: int, hint: str) -> None:
    """Axes from ``first`` on form one dense row-major block. Strides of size-1 axes are free."""
    width = 1
    for axis in range(x.dim() - 1, first - 1, -1):
        if x.shape[axis] > 1 and x.stride(axis) != width:
            refuse_stride(name, x, f"stride({axis}) = {width}", hint)
        width *= x.shape[axis]


def check_state(
    name: str,
    x: Tensor,
    slots: int | None,
    shape: tuple[int, int, int, int],
    index: int,
    written: bool,
) -> Extent:
    """A state [slots, HV, V, K], dense inside a slot; ``slots`` None: a pool of any size."""
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1:] != shape[1:]:
        lead: tuple[str, object] = ("N", shape[0]) if slots is not None else ("slots", "slots")
        want = (lead[1], *shape[1:])
        hint = "States are stored V-major: V before K."
        refuse_shape(name, x, f"[{lead[0]}, HV, V, K]", want, hint)
    if slots is not None and x.shape[0] != slots:
        hint = "For a pool of states, pass state_indices." if name == "initial_state" else ""
        refuse_shape(name, x, "[N, HV, V, K]", shape, hint)
    if x.dtype not in _STATE_DTYPES:
        refuse_dtype(name, x, _STATE_DTYPES)
    if x.get_device() != index:
        refuse_device(name, x, index)
    if x.is_contiguous():
        return x.nbytes, 0
    check_dense(
        name,
        x,
        1,
        "Only sequences (slots) may lie apart, and states are V-major; one stored [HV, K, V] needs "
        ".transpose(-1, -2).contiguous().",
    )
    strides = x.stride()
    width = shape[1] * shape[2] * shape[3]
    if written and x.shape[0] > 1 and strides[0] < width:
        refuse_stride(name, x, f"stride(0) >= {width}", "It is written, so it must not overlap.")
    size = x.element_size()
    return ((x.shape[0] - 1) * strides[0] + width) * size, strides[0] * size


def check_same_pool(final_state: object, pool: object) -> None:
    """With state_indices, final_state is None or the pool; two views of it are as good as one."""
    if final_state is not None and final_state is not pool and not same_view(final_state, pool):
        raise InputError(
            "final_state: expected None or the very pool given as initial_state, since "
            f"state_indices makes the pool be updated in place, got another {kind_of(final_state)}."
        )


def check_parameter(name: str, x: Tensor, index: int) -> Extent:
    if x.dtype is not torch.float32:
        refuse_dtype(name, x, (torch.float32,), "Keep gate parameters in float32.")
    if x.get_device() != index:
        refuse_device(name, x, index)
    return _extent(x)


def check_cu_seqlens(x: Tensor, B: int) -> int:
    """Returns N. The contents are looked at in ``check_contents``, on the CPU only."""
    if not isinstance(x, Tensor) or x.dim() != 1 or x.shape[0] == 0:
        refuse_shape("cu_seqlens", x, "[N + 1]", None, "It starts with 0.")
    if B != 1:
        raise InputError(
            f"cu_seqlens: expected B = 1, got B = {B}. Packed sequences lie one after the other "
            "in a batch of one: q.reshape(1, B * T, H, K)."
        )
    return x.shape[0] - 1


def check_per_sequence(
    name: str,
    x: Tensor,
    size: int,
    dtypes: tuple[torch.dtype, ...],
    index: int,
    strided: bool = False,
) -> Extent:
    """One number or flag per sequence; ``strided``: any positive stride, such as a column."""
    if not isinstance(x, Tensor) or x.shape != (size,):
        refuse_shape(name, x, "[N]", (size,), "It holds one element per sequence.")
    if x.dtype not in dtypes:
        refuse_dtype(name, x, dtypes)
    if x.get_device() != index:
        refuse_device(name, x, index)
    if not x.is_contiguous() and not (strided and x.stride(0) > 0):
        refuse_stride(name, x, "stride(0) >= 1" if strided else "contiguous")
    return _extent(x)


def check_place(device: torch.device | str | None) -> torch.device:
    """The device to work on, a GPU with its index; None: the current one, the CPU without any."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if gpus else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"device: expected cpu, cuda or cuda:N, got {device!r}.") from None
    if place.type != "cuda":
        return place
    if (place.index or 0) >= gpus:
        raise DeviceError(
            f"device: expected one that torch can use, got {place}; GPUs that it finds: {gpus}."
        )
    return torch.device("cuda", torch.cuda.current_device()) if place.index is None else place


def _extent(x: Tensor) -> Extent:
    """Of a tensor whose strides nobody asks to be aligned."""
    if x.is_contiguous():
        return x.nbytes, 0
    start, end = address_range(x)
    return end - start, 0


def check_lower_bound(value: object) -> float:
    """The slow path: integers and other real numbers are taken as floats; the rest is refused."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputTypeError(f"lower_bound: expected a float or None, got {kind_of(value)}.")
    bound = _as_float(value)
    if not LOWEST_BOUND <= bound < 0.0:
        raise InputError(
            f"lower_bound: expected None or a number in [{LOWEST_BOUND:g}, 0), got {bound:g}. It "
            "is the lowest log decay per token; None selects the unbounded softplus gate."
        )
    return bound


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return inf


def check_scale(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputTypeError(f"scale: expected a float or None, got {kind_of(value)}.")
    scale = _as_float(value)
    if not -LARGEST <= scale <= LARGEST:
        raise InputError(
            f"scale: expected a finite number (in float32) or None (K ** -0.5), got {scale}."
        )
    return scale


# -- contents, where the host can see them -------------------------------------------------------


def check_contents(
    B: int,
    T: int,
    N: int,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None,
    pool: Tensor | None,
    checkpoint_offsets: Tensor | None,
) -> None:
    """Values of the index tensors of a CPU call. On a GPU the kernels guard what they address."""
    lengths = [T] * B
    if cu_seqlens is not None:
        ends: list[int] = cu_seqlens.tolist()
        if ends[0] != 0:
            raise InputError(f"cu_seqlens: expected to start with 0, got {ends[0]}.")
        lengths = [ends[i + 1] - ends[i] for i in range(N)]
        for i, length in enumerate(lengths):
            if length < 0:
                raise InputError(
                    f"cu_seqlens: expected values that never decrease, got {ends[i]} then "
                    f"{ends[i + 1]} at position {i + 1}. Pass offsets, not lengths."
                )
        if ends[-1] > T:
            raise InputError(f"cu_seqlens: expected to end at most at T = {T}, got {ends[-1]}.")
    if state_indices is not None:
        assert pool is not None
        slots = pool.shape[0]
        owner: dict[int, int] = {}
        for i, slot in enumerate(state_indices.tolist()):
            if slot >= slots:
                raise InputError(
                    f"state_indices: expected slots below {slots}, the size of the pool, got "
                    f"{slot} for sequence {i}."
                )
            if slot >= 0 and owner.setdefault(slot, i) != i:
                raise InputError(
                    "state_indices: expected one slot per sequence, got slot "
                    f"{slot} for sequences {owner[slot]} and {i}. Mark padding with -1."
                )
    if checkpoint_offsets is not None:
        for i, offset in enumerate(checkpoint_offsets.tolist()):
            if offset % CHECKPOINT_GRANULE or not 0 <= offset <= lengths[i]:
                raise InputError(
                    f"checkpoint_offsets: expected multiples of {CHECKPOINT_GRANULE} from 0 "
                    f"(none) to the length, got {offset} for sequence {i} of {lengths[i]} tokens."
                )


def check_grad(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    found = [name for name, x in zip(names, tensors) if x is not None and x.requires_grad]
    if found:
        raise GradError(
            f"{', '.join(found)}: expected requires_grad=False, got True. This is forward only: "
            "call it under torch.no_grad(), or detach the tensor."
        )
