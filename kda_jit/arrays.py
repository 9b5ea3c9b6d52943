"""Arrays of other libraries: in through DLPack, out as ``q``'s library has them, nothing copied.

`kda_jit.prefill` and `kda_jit.recurrent` come here when ``q`` is no torch tensor but has
``__dlpack__``: CuPy, JAX, NumPy on the CPU, or anything else. Arrays and torch tensors may be
mixed; what is new comes back as ``q``'s kind, what the caller gave to be written comes back itself.

Streams. CuPy has a current stream, and the call runs on it. Other libraries have none to ask for:
there the call runs on torch's current stream, DLPack makes that wait for the inputs, and whoever
takes the results wait for it. Memory that such a library could reuse meanwhile is held until then.
Nothing waits on the host.

What torch's own importer does not look at is looked at here: a negative stride makes it abort the
process, and a read-only array it would write to.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kda_jit.api import prefill as _prefill
from kda_jit.errors import DeviceError, InputError, InputTypeError
from kda_jit.recurrent import recurrent as _recurrent

_CPU, _CUDA = 1, 2  # DLDeviceType
#: CuPy divides a negative stride in bytes as a number without sign: what comes out is beyond this.
_FARTHEST = 2**56
_READ_ONLY = 1  # a bit of the flags of a versioned capsule
#: Neither exports bfloat16 (a type of ml_dtypes there) everywhere, so its bits travel as uint16.
_BITS = ("numpy", "cupy")
#: Arrays of these libraries are immutable, whether or not they say so.
_IMMUTABLE = ("jax", "jaxlib")


def prefill(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    cu_seqlens: Any,
    out: Any,
    final_state: Any,
    state_indices: Any,
    has_initial_state: Any,
    checkpoint_state: Any,
    checkpoint_offsets: Any,
    **rest: Any,
) -> tuple[Any, Any]:
    """`kda_jit.prefill` over arrays."""
    pooled = state_indices is not None
    with _visit(q) as (take, give):
        new_out, new_state = _prefill(
            take("q", q),
            take("k", k),
            take("v", v),
            take("g", g),
            take("beta", beta),
            A_log=take("A_log", A_log),
            dt_bias=take("dt_bias", dt_bias),
            initial_state=take("initial_state", initial_state, written=pooled),
            cu_seqlens=take("cu_seqlens", cu_seqlens),
            out=take("out", out, written=True),
            final_state=take("final_state", final_state, written=True),
            state_indices=take("state_indices", state_indices),
            has_initial_state=take("has_initial_state", has_initial_state),
            checkpoint_state=take("checkpoint_state", checkpoint_state, written=True),
            checkpoint_offsets=take("checkpoint_offsets", checkpoint_offsets),
            **rest,
        )
        given_state = initial_state if pooled else final_state
        return (
            give(new_out) if out is None else out,
            give(new_state) if given_state is None else given_state,
        )


def recurrent(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    A_log: Any,
    dt_bias: Any,
    state_pool: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    has_initial_state: Any,
    cu_seqlens: Any,
    write_state: bool,
    out: Any,
    **rest: Any,
) -> Any:
    """`kda_jit.recurrent` over arrays."""
    with _visit(q) as (take, give):
        new_out = _recurrent(
            take("q", q),
            take("k", k),
            take("v", v),
            take("g", g),
            take("beta", beta),
            A_log=take("A_log", A_log),
            dt_bias=take("dt_bias", dt_bias),
            state_pool=take("state_pool", state_pool, written=write_state is not False),
            state_indices=take("state_indices", state_indices),
            num_accepted_tokens=take("num_accepted_tokens", num_accepted_tokens),
            has_initial_state=take("has_initial_state", has_initial_state),
            cu_seqlens=take("cu_seqlens", cu_seqlens),
            write_state=write_state,
            out=take("out", out, written=True),
            **rest,
        )
        return give(new_out) if out is None else out


# -- one call ------------------------------------------------------------------------------------


class _Take:
    """Makes tensors of arguments; notes what it saw."""

    def __init__(self) -> None:
        self.views: list[Tensor] = []

    def __call__(self, name: str, x: Any, *, written: bool = False) -> Any:
        if x is None or isinstance(x, Tensor):
            return x
        view = _to_tensor(name, x, written)
        self.views.append(view)
        return view


@contextmanager
def _visit(q: Any) -> Iterator[tuple[_Take, Callable[[Tensor], Any]]]:
    """Functions that turn arguments into tensors and results into arrays of q's kind."""
    give = _exporter(q)  # refuses before anything runs
    take = _Take()
    device = _device_of("q", q)
    if device is None:
        yield take, give
        return
    handle, ours = _stream_of(q, device), torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        if handle is None:
            yield take, give
            _hold(take.views, ours)
        elif handle == ours.cuda_stream:
            yield take, give
        else:
            # Torch tensors among the arguments belong to torch's stream.
            theirs = _stream(handle, device)
            theirs.wait_stream(ours)
            with torch.cuda.stream(theirs):
                yield take, give
            ours.wait_stream(theirs)


def _stream_of(x: Any, device: torch.device) -> int | None:
    """The handle of the stream that x's library works on; None where it cannot be asked."""
    if _library_of(x) != "cupy":
        return None
    handle: int = sys.modules["cupy"].cuda.get_current_stream(device.index).ptr
    return 0 if handle == 1 else handle  # two names of the legacy stream, which is torch's default


def _stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


#: Views of memory that its library may believe to be free, and when they will be.
_held: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()


def _hold(views: list[Tensor], stream: torch.cuda.Stream) -> None:
    """Keeps memory alive until what was sent to the stream is done."""
    if torch.cuda.is_current_stream_capturing():
        return  # as with any graph, its owner keeps the inputs
    while _held and _held[0][0].query():
        _held.popleft()
    event = torch.cuda.Event()
    event.record(stream)
    _held.append((event, views))


# -- in ------------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Facts(NamedTuple):
    strides: tuple[int, ...]
    read_only: bool


def _facts_of(capsule: object) -> _Facts:
    name: bytes = _capsule_name(capsule)
    pointer: int = _capsule_pointer(capsule, name)
    if name == b"dltensor_versioned":
        versioned = _Versioned.from_address(pointer)
        tensor, flags = versioned.tensor, versioned.flags
    else:
        tensor, flags = _DLTensor.from_address(pointer), 0
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else ()
    return _Facts(strides, bool(flags & _READ_ONLY))


def _to_tensor(name: str, x: Any, written: bool) -> Tensor:
    """The same memory as a tensor."""
    device = _device_of(name, x)
    if written and _is_immutable(x):
        _refuse_read_only(name, x)
    bits = x
    if _is_bfloat16(x) and _library_of(x) in _BITS:
        bits = x.view("uint16")
    request: dict[str, Any] = {"max_version": (1, 0)}
    if device is not None:
        request["stream"] = torch.cuda.current_stream(device).cuda_stream or 1
    try:
        try:
            capsule = bits.__dlpack__(**request)
        except TypeError:  # a producer from before version 1
            del request["max_version"]
            capsule = bits.__dlpack__(**request)
        facts = _facts_of(capsule)
    except Exception as error:
        raise InputTypeError(
            f"{name}: expected an array that can be exported through DLPack, got {_kind(x)}, which "
            f"says: {error}"
        ) from error
    if not all(0 <= stride < _FARTHEST for stride in facts.strides):
        raise InputError(
            f"{name}: expected strides of 0 or more, got {facts.strides} for {_kind(x)}. Torch has "
            "no tensor like that; make a copy in order."
        )
    if written and facts.read_only:
        _refuse_read_only(name, x)
    try:
        tensor = from_dlpack(capsule)
    except Exception as error:
        raise InputTypeError(
            f"{name}: expected an array of a kind that torch has, got {_kind(x)}: {error}"
        ) from error
    return tensor if bits is x else tensor.view(torch.bfloat16)


def _device_of(name: str, x: Any) -> torch.device | None:
    """A CUDA device; None for the CPU."""
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise InputTypeError(
            f"{name}: expected a torch.Tensor or, as q is none, an array with __dlpack__ and "
            f"__dlpack_device__, got {_kind(x)}."
        )
    kind, index = (int(number) for number in x.__dlpack_device__())
    if kind == _CPU:
        return None
    if kind != _CUDA:
        raise DeviceError(
            f"{name}: expected memory of the CPU or of a CUDA device (1 or 2 in DLPack), got a "
            f"device of type {kind} for {_kind(x)}."
        )
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"{name}: expected memory of a device that torch sees, {torch.cuda.device_count()} of "
            f"CUDA here, got CUDA device {index}."
        )
    return torch.device("cuda", index)


def _is_immutable(x: Any) -> bool:
    if _library_of(x) in _IMMUTABLE:
        return True
    return getattr(getattr(x, "flags", None), "writeable", True) is False


def _refuse_read_only(name: str, x: Any) -> NoReturn:
    hint = "JAX's arrays cannot be written." if _library_of(x) in _IMMUTABLE else ""
    text = f"{name}: expected an array that may be written, got a read-only {_kind(x)}. {hint}"
    raise InputError(text.rstrip())


# -- out -----------------------------------------------------------------------------------------


def _exporter(like: Any) -> Callable[[Tensor], Any]:
    """A function from tensors to arrays like this one, over the same memory."""
    importer = _importer_of(like)

    def give(x: Tensor) -> Any:
        if x.dtype is torch.bfloat16 and _library_of(like) in _BITS:
            return importer(x.view(torch.uint16)).view(like.dtype)
        return importer(x)

    return give


def _importer_of(like: Any) -> Callable[[Any], Any]:
    """``from_dlpack`` of the array's library: of its array API, else of its package."""
    spaces = [sys.modules.get(_library_of(like))]
    if hasattr(like, "__array_namespace__"):
        spaces.append(like.__array_namespace__())
    for space in spaces:
        importer = getattr(space, "from_dlpack", None)
        if importer is not None:
            found: Callable[[Any], Any] = importer
            return found
    raise InputTypeError(
        f"q: expected an array whose library has from_dlpack, to return results of its kind, got "
        f"{_kind(like)}, which has no __array_namespace__ and no {_library_of(like)}.from_dlpack."
    )


def _library_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _is_bfloat16(x: Any) -> bool:
    return str(getattr(x, "dtype", "")) == "bfloat16"


def _kind(x: Any) -> str:
    cls = type(x)
    name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
    facts = [f"{fact} {getattr(x, fact)}" for fact in ("dtype", "shape") if hasattr(x, fact)]
    return f"{name} ({', '.join(facts)})" if facts else name
