"""What calls have in common whose tensors differ in nothing but their addresses: checked once.

Reading shapes, strides and dtypes takes a third of the time of checking them. So a call is looked
up by these first, and only a call of a new kind goes through the checks; a refused one is never
remembered. Numbers, addresses, ``requires_grad`` and contents are not part of a layout: those are
looked at on every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_jit.contract.checks import (
    FLOATS,
    INDEX_DTYPES,
    check_cu_seqlens,
    check_parameter,
    check_per_sequence,
    check_same_pool,
    check_state,
    check_tokens,
)
from kda_jit.contract.memory import ALIGNMENT, NOWHERE, check_aliasing, misaligned_names
from kda_jit.contract.words import refuse_dtype, refuse_shape, shape_of
from kda_jit.errors import DeviceError, InputError

#: The tensor arguments in the order of every tuple here, which is that of the kernels' argument.
TENSORS = (
    "q", "k", "v", "g", "beta", "out", "A_log", "dt_bias",
    "initial_state", "final_state", "checkpoint_state",
    "cu_seqlens", "state_indices", "has_initial_state", "checkpoint_offsets",
)  # fmt: skip
OUT, A_LOG, DT_BIAS, INITIAL, FINAL, CHECKPOINT = range(5, 11)
#: Those that a backend may want at multiples of ``ALIGNMENT``.
_ALIGNED = (0, 1, 2, 3, OUT, INITIAL, FINAL, CHECKPOINT)

#: Layouts remembered, and sets of addresses of all layouts together, before starting over: some
#: megabytes. Each layer of a model brings addresses of its own.
MAX_LAYOUTS = 512
MAX_PLACES = 8192

#: One of each of ``TENSORS``, or None; not yet known to be tensors.
Arguments = tuple[Any, ...]

#: Tokens this many elements apart are named in ``Layout.far_tokens``: their distance in bytes is no
#: 32-bit number, in which a backend may want to keep it.
FAR = 1 << 30

# Unlike a method of x, this one refuses whatever is no tensor.
_data_ptr = Tensor.data_ptr


class Layout:
    """Sizes of one kind of legal call, and what was found out about it. Holds no tensor.

    memo    what others remember about calls of this layout, under keys of their own. It is dropped
            along with the layout, which is equal only to itself.
    """

    __slots__ = (
        "B", "H", "HV", "K", "N", "T", "V", "device", "extents", "far_tokens", "in_place",
        "memo", "stride_bits", "written",
    )  # fmt: skip

    def __init__(
        self,
        device: torch.device,
        sizes: tuple[int, int, int, int, int, int, int],
        extents: tuple[tuple[int, int], ...],
        written: tuple[int, ...],
        in_place: bool,
        far_tokens: tuple[str, ...],
    ) -> None:
        """
        sizes     B, T, H, HV, K, V, N
        extents   bytes from a tensor's start to its end, and the strides in bytes that should be
                  aligned, or-ed; of each of ``TENSORS``
        written   places in ``TENSORS`` of the caller's buffers that a call writes
        in_place  the final state, at the address of the initial one, is the initial one
        far_tokens  names of those whose tokens are ``FAR`` or more elements apart
        """
        self.device = device
        self.B, self.T, self.H, self.HV, self.K, self.V, self.N = sizes
        self.extents = extents
        self.written = written
        self.in_place = in_place
        self.far_tokens = far_tokens
        self.stride_bits = 0
        for _, bits in extents:
            self.stride_bits |= bits
        self.memo: dict[object, Any] = {}


_layouts: dict[object, Layout] = {}
#: What passed `check_placement`, and the names of what is misaligned there.
_places: dict[tuple[Layout, tuple[int, ...]], tuple[str, ...]] = {}


def find_layout(tensors: Arguments) -> tuple[Layout, tuple[int, ...]]:
    """The layout of a call, checked unless it is known, and the addresses of its tensors (or 0).

    Raises whatever is wrong with shapes, strides, dtypes or devices.
    """
    try:
        addresses = tuple([0 if x is None else _data_ptr(x) for x in tensors])
        facts = tuple(
            [
                None
                if x is None
                else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device())
                for x in tensors
            ]
        )
        # Off the GPU get_device() is -1 whatever the device.
        key = (tensors[0].device, facts)
    except (AttributeError, TypeError):
        check_layout(tensors)  # says which of them is no tensor
        raise
    layout = _layouts.get(key)
    if layout is None:
        layout = check_layout(tensors)
        if len(_layouts) >= MAX_LAYOUTS:
            _layouts.clear()
        _layouts[key] = layout
    return layout, addresses


def check_layout(tensors: Arguments) -> Layout:
    """Everything that depends on no number, address or content of the arguments."""
    (
        q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, checkpoint_state,
        cu_seqlens, state_indices, has_initial_state, checkpoint_offsets,
    ) = tensors  # fmt: skip

    # -- q fixes B, T, H, K, the dtype and the device; v fixes HV and V --------------------------
    if not isinstance(q, Tensor) or q.dim() != 4:
        refuse_shape("q", q, "[B, T, H, K]", None)
    if not isinstance(v, Tensor) or v.dim() != 4:
        refuse_shape("v", v, "[B, T, HV, V]", None)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    dtype = q.dtype
    index = q.get_device()
    if H == 0 or K == 0 or V == 0:
        raise InputError(
            "q, v: expected at least one head and one channel, got "
            f"q {shape_of(q)}, v {shape_of(v)}."
        )
    if HV == 0 or HV % H:
        raise InputError(
            f"v: expected HV, the number of value heads, to be a multiple of H = {H}, got HV = "
            f"{HV}. Each q/k head serves HV / H value heads."
        )
    if dtype not in FLOATS:
        refuse_dtype("q", q, FLOATS)
    if not q.is_cpu and not q.is_cuda:
        raise DeviceError(f"q: expected a CUDA or CPU tensor, got one on {q.device}.")
    extents = dict.fromkeys(TENSORS, NOWHERE)
    extents["q"] = check_tokens("q", q, (B, T, H, K), "[B, T, H, K]", index)
    extents["k"] = check_tokens("k", k, (B, T, H, K), "[B, T, H, K]", index)
    extents["v"] = check_tokens("v", v, (B, T, HV, V), "[B, T, HV, V]", index)
    extents["g"] = check_tokens("g", g, (B, T, HV, K), "[B, T, HV, K]", index)
    # Nobody asks for aligned rows of beta.
    extents["beta"] = (check_tokens("beta", beta, (B, T, HV), "[B, T, HV]", index)[0], 0)
    if k.dtype is not dtype:
        refuse_dtype("k", k, (dtype,), "q, k and v share one dtype.")
    if v.dtype is not dtype:
        refuse_dtype("v", v, (dtype,), "q, k and v share one dtype.")
    if g.dtype is not dtype and g.dtype is not torch.float32:
        refuse_dtype("g", g, (dtype, torch.float32))
    if beta.dtype is not dtype and beta.dtype is not torch.float32:
        refuse_dtype("beta", beta, (dtype, torch.float32))

    # -- gate parameters -------------------------------------------------------------------------
    if not isinstance(A_log, Tensor) or A_log.numel() != HV:
        refuse_shape("A_log", A_log, "[HV]", (HV,), "It holds one number per value head.")
    extents["A_log"] = check_parameter("A_log", A_log, index)
    if not isinstance(dt_bias, Tensor) or dt_bias.shape not in ((HV * K,), (HV, K)):
        refuse_shape(
            "dt_bias",
            dt_bias,
            "[HV, K] or [HV * K]",
            (HV, K),
            "It holds one number per value head and key channel, not one per head.",
        )
    extents["dt_bias"] = check_parameter("dt_bias", dt_bias, index)

    # -- sequences -------------------------------------------------------------------------------
    N = B
    if cu_seqlens is not None:
        N = check_cu_seqlens(cu_seqlens, B)
        extents["cu_seqlens"] = check_per_sequence(
            "cu_seqlens", cu_seqlens, N + 1, INDEX_DTYPES, index
        )

    # -- states and other results ----------------------------------------------------------------
    shape = (N, HV, V, K)
    written = []
    in_place = False
    if state_indices is not None:
        if initial_state is None:
            raise InputError(
                "state_indices: expected initial_state, the pool [slots, HV, V, K] that they "
                "index, got initial_state=None. For new states without a pool, drop state_indices."
            )
        extents["state_indices"] = check_per_sequence(
            "state_indices", state_indices, N, INDEX_DTYPES, index, strided=True
        )
        extents["initial_state"] = check_state(
            "initial_state", initial_state, None, shape, index, True
        )
        check_same_pool(final_state, initial_state)
        written.append(INITIAL)
    else:
        if initial_state is not None:
            extents["initial_state"] = check_state(
                "initial_state", initial_state, N, shape, index, False
            )
        if final_state is not None:
            extents["final_state"] = check_state("final_state", final_state, N, shape, index, True)
            written.append(FINAL)
            in_place = (
                initial_state is not None
                and final_state.stride() == initial_state.stride()
                and final_state.dtype is initial_state.dtype
            )
    if has_initial_state is not None:
        if initial_state is None:
            raise InputError(
                "has_initial_state: expected initial_state along with it, got initial_state=None."
            )
        extents["has_initial_state"] = check_per_sequence(
            "has_initial_state", has_initial_state, N, (torch.bool,), index
        )
    if checkpoint_state is not None or checkpoint_offsets is not None:
        if checkpoint_state is None or checkpoint_offsets is None:
            missing = "checkpoint_state" if checkpoint_state is None else "checkpoint_offsets"
            raise InputError(
                "checkpoint_state, checkpoint_offsets: expected both or neither, got "
                f"{missing}=None."
            )
        extents["checkpoint_state"] = check_state(
            "checkpoint_state", checkpoint_state, N, shape, index, True
        )
        extents["checkpoint_offsets"] = check_per_sequence(
            "checkpoint_offsets", checkpoint_offsets, N, INDEX_DTYPES, index
        )
        written.append(CHECKPOINT)
    if out is not None:
        extents["out"] = check_tokens("out", out, (B, T, HV, V), "[B, T, HV, V]", index, True)
        if out.dtype is not dtype:
            refuse_dtype("out", out, (dtype,), "The output has the dtype of v.")
        written.insert(0, OUT)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out}
    far_tokens = [name for name, x in tokens.items() if x is not None and x.stride(1) >= FAR]
    return Layout(
        q.device, (B, T, H, HV, K, V, N), tuple(extents.values()), tuple(written), in_place,
        tuple(far_tokens) if T > 1 else (),
    )  # fmt: skip


def check_placement(
    layout: Layout, tensors: Arguments, addresses: tuple[int, ...]
) -> tuple[str, ...]:
    """Refuses what is written where something else lies; returns the names of what is misaligned.

    Like the layout, addresses that come again are known. All that is remembered are numbers.
    """
    place = (layout, addresses)
    misaligned = _places.get(place)
    if misaligned is not None:
        return misaligned
    spans = [
        (start, start + size) for start, (size, _) in zip(addresses, layout.extents, strict=True)
    ]
    if layout.in_place and addresses[INITIAL] == addresses[FINAL]:
        spans[INITIAL] = (0, 0)  # the span of the final state says it all
    if any(_meets(spans, i) for i in layout.written):
        named = dict(zip(TENSORS, tensors, strict=True))
        if tensors[TENSORS.index("state_indices")] is not None:
            del named["final_state"]  # it is the pool, which has another name
        written = {TENSORS[i]: named.pop(TENSORS[i]) for i in layout.written}
        check_aliasing(written, named)
    bits = layout.stride_bits
    for i in _ALIGNED:
        bits |= addresses[i]
    misaligned = ()
    if bits & (ALIGNMENT - 1):
        misaligned = misaligned_names({TENSORS[i]: tensors[i] for i in _ALIGNED})
    if len(_places) >= MAX_PLACES:
        _places.clear()
    _places[place] = misaligned
    return misaligned


def _meets(spans: list[tuple[int, int]], i: int) -> bool:
    """Whether tensor i may share a byte with another, judged by address ranges alone."""
    start, end = spans[i]
    for j, (other_start, other_end) in enumerate(spans):
        if other_start < end and start < other_end and i != j:
            return True
    return False
