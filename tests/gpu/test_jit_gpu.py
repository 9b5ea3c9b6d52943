"""The JIT layer on a real device: load, launch, order, capture, shared memory, several devices."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kda_jit import jit
from kda_jit.errors import CaptureError, LaunchError
from kda_jit.jit.driver import FUNC_SMEM_CARVEOUT, driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPO = Path(__file__).resolve().parents[2]


class Echo(ctypes.Structure):
    """288 bytes with every kind of field, odd alignments in between, and a last one to miss."""

    _fields_ = [
        ("out", ctypes.c_uint64),
        ("byte", ctypes.c_uint8),
        ("short", ctypes.c_int16),
        ("int_", ctypes.c_int32),
        ("long_", ctypes.c_int64),
        ("float_", ctypes.c_float),
        ("double_", ctypes.c_double),
        ("bulk", ctypes.c_uint8 * 240),
        ("last", ctypes.c_int32),
    ]


SOURCE = """
struct Echo {
    unsigned long long out; unsigned char byte; short short_; int int_; long long long_;
    float float_; double double_; unsigned char bulk[240]; int last;
};
static_assert(sizeof(Echo) == SIZE);
extern "C" __global__ void echo(const __grid_constant__ Echo a) {
    double* fields = reinterpret_cast<double*>(a.out);
    if (threadIdx.x == 0) {
        fields[0] = a.byte; fields[1] = a.short_; fields[2] = a.int_; fields[3] = double(a.long_);
        fields[4] = a.float_; fields[5] = a.double_; fields[6] = a.last;
    }
    unsigned char* bytes = reinterpret_cast<unsigned char*>(fields + 7);
    for (int i = threadIdx.x; i < int(sizeof(Echo)); i += blockDim.x)
        bytes[i] = reinterpret_cast<const unsigned char*>(&a)[i];
}

struct Pair { float* x; float* y; long long count; };
extern "C" __global__ void slow_add(const __grid_constant__ Pair a) {  // count: nanoseconds to wait
#ifdef DEPENDENT
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < a.count);
    a.y[threadIdx.x] = a.x[threadIdx.x] + 1.0f;
}

extern "C" __global__ void smem(const __grid_constant__ Pair a) {  // count: bytes of dynamic smem
    extern __shared__ unsigned char bytes[];
    for (long long i = threadIdx.x; i < a.count; i += blockDim.x) bytes[i] = i % 251;
    __syncthreads();
    int wrong = 0;
    for (long long i = threadIdx.x; i < a.count; i += blockDim.x)
        wrong += bytes[a.count - 1 - i] != (a.count - 1 - i) % 251;
    atomicAdd(a.y, float(wrong));
    if (threadIdx.x == 0) atomicAdd(a.y + 1, 1.0f);
}

extern "C" __global__ void smem_and_static(const __grid_constant__ Pair a) {
    __shared__ int own[4];
    extern __shared__ unsigned char bytes[];
    own[threadIdx.x % 4] = threadIdx.x;
    bytes[a.count - 1] = 7;
    __syncthreads();
    if (threadIdx.x == 0) a.y[0] = bytes[a.count - 1] + own[0] * 0.0f;
}

extern "C" __global__ void nothing() {}
"""


class Pair(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("count", ctypes.c_int64)]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KDA_JIT_ARCH", raising=False)
        patch.setenv("KDA_JIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("kda_jit.jit.cache._writable", {})
        yield


def kernel(name: str, device: int = 0, target: str | None = None, **defines: object) -> jit.Kernel:
    if target is None:
        found = jit.arch_for(torch.cuda.get_device_capability(device))
        assert found is not None
        target = found.target
    built = jit.compile_source(
        SOURCE, target=target, defines={"SIZE": ctypes.sizeof(Echo), **defines}
    )
    return jit.load(built.spec, device).kernels[name]


def stream(device: int = 0) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def check_echo(device: int = 0, target: str | None = None) -> None:
    values = (201, -1234, -(2**30) - 3, -(2**40) - 7, 0.0883883461356163, 1e-300, 2**30 + 5)
    out = torch.zeros(56 + ctypes.sizeof(Echo), dtype=torch.uint8, device=f"cuda:{device}")
    bulk = (ctypes.c_uint8 * 240)(*range(240))
    args = Echo(out.data_ptr(), *values[:6], bulk, values[6])
    kernel("echo", device, target).launch((1, 1, 1), 64, 0, stream(device), args)
    got = out.cpu()
    fields = got[:56].view(torch.float64).tolist()
    assert fields[:4] == list(values[:4])
    assert fields[4] == ctypes.c_float(values[4]).value
    assert fields[5:] == list(values[5:])
    assert bytes(got[56:].tolist()) == bytes(args)


def test_every_field_of_a_large_struct_comes_back() -> None:
    check_echo()


def test_portable_ptx_is_compiled_by_the_driver_and_runs() -> None:
    check_echo(target="compute_80")


def test_struct_of_another_size_is_refused() -> None:
    found = kernel("echo")
    assert found.args_bytes == ctypes.sizeof(Echo)
    with pytest.raises(LaunchError, match="expected 288 bytes of arguments, got 287"):
        found.launch((1, 1, 1), 64, 0, stream(), bytes(Echo())[:-1])
    kernel("nothing").launch((1, 1, 1), 32, 0, stream())
    torch.cuda.synchronize()


def test_blocks_that_are_to_start_together_have_to_fit() -> None:
    found = kernel("nothing")
    found.launch((8, 1, 1), 32, 0, stream(), cooperative=True)
    with pytest.raises(LaunchError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        found.launch((1 << 20, 1, 1), 32, 0, stream(), cooperative=True)
    found.launch((1 << 20, 1, 1), 32, 0, stream())
    torch.cuda.synchronize()


@pytest.mark.parametrize("pdl", [False, True])
def test_side_stream_keeps_order_and_leaves_the_default_stream_alone(pdl: bool) -> None:
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs capability 9.0")
    add = kernel("slow_add", **({"DEPENDENT": 1} if pdl else {}))
    x = torch.zeros(32, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        args = Pair(x.data_ptr(), x.data_ptr(), 20_000_000)
        for _ in range(5):  # 100 ms on the device, one after the other
            add.launch((1, 1, 1), 32, 0, stream(), args, pdl=pdl)
        busy = not side.query()
        idle = torch.cuda.default_stream().query()
        doubled = x * 2  # torch's own kernel, ordered behind ours
    side.synchronize()
    assert busy, "the launches did not go to the side stream, or they waited"
    assert idle, "the launches went to the default stream too"
    assert x.tolist() == [5.0] * 32
    assert doubled.tolist() == [10.0] * 32


def test_arguments_are_copied_before_launch_returns() -> None:
    add = kernel("slow_add")
    x = torch.zeros(2, 32, device="cuda")
    args = Pair(x[0].data_ptr(), x[0].data_ptr(), 10_000_000)
    add.launch((1, 1, 1), 32, 0, stream(), args)
    args.x = args.y = x[1].data_ptr()
    add.launch((1, 1, 1), 32, 0, stream(), args)
    assert x.tolist() == [[1.0] * 32, [1.0] * 32]


@pytest.mark.parametrize("size", [1024, 49151, 49152, 49153, 100 * 1024, 227 * 1024, "most"])
def test_dynamic_shared_memory_of_every_size(size: int | str) -> None:
    found = kernel("smem")
    asked = found.smem_dynamic if isinstance(size, str) else size
    if asked > found.smem_dynamic:
        pytest.skip(f"{asked} bytes are more than this device has, {found.smem_dynamic}")
    y = torch.zeros(2, device="cuda")
    found.launch((3, 1, 1), 128, asked, stream(), Pair(None, y.data_ptr(), asked))
    assert y.tolist() == [0.0, 3.0]


@pytest.mark.parametrize("size", [49136, 49137, 49152])
def test_static_and_dynamic_shared_memory_add_up(size: int) -> None:
    found = kernel("smem_and_static")
    assert found.smem_static == 16
    assert found.smem_dynamic == driver().device_attribute(0, 97) - 16
    y = torch.zeros(2, device="cuda")
    found.launch((1, 1, 1), 32, size, stream(), Pair(None, y.data_ptr(), size))
    assert y.tolist() == [7.0, 0.0]


@pytest.mark.parametrize("name", ["nothing", "slow_add", "smem", "smem_and_static"])
def test_every_kernel_prefers_the_most_shared_memory(name: str) -> None:
    """So that none makes an SM divide its memory anew. A launch leaves it as it is."""
    found = kernel(name)
    handle = found._handle.value
    assert handle is not None
    for _ in range(2):
        assert driver().function_attribute(handle, FUNC_SMEM_CARVEOUT) == 100
        kernel("nothing").launch((1, 1, 1), 32, 0, stream())
    torch.cuda.synchronize()


def test_too_much_shared_memory_is_an_error_that_leaves_the_device_usable() -> None:
    found = kernel("smem")
    y = torch.zeros(2, device="cuda")
    asked = found.smem_dynamic + 1
    with pytest.raises(LaunchError, match=rf"CUDA_ERROR_INVALID_VALUE.*{asked} bytes"):
        found.launch((1, 1, 1), 32, asked, stream(), Pair(None, y.data_ptr(), asked))
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID"):
        found.launch((0, 1, 1), 32, 0, stream(), Pair(None, y.data_ptr(), 0))
    check_echo()


def test_attributes_agree_with_ptxas_and_the_occupancy_is_sane() -> None:
    found = kernel("slow_add")
    target = jit.arch_for(torch.cuda.get_device_capability())
    assert target is not None
    built = jit.compile_source(
        SOURCE, target=target.target, defines={"SIZE": ctypes.sizeof(Echo)}
    ).resources["slow_add"]
    assert found.registers == built.registers
    assert found.local_bytes == built.stack == 0
    assert found.max_threads == 1024
    most = torch.cuda.get_device_properties(0).max_threads_per_multi_processor
    assert found.max_active_blocks(1024, 0) == most // 1024
    assert found.max_active_blocks(128, found.smem_dynamic) == 1
    assert found.max_active_blocks(128, found.smem_dynamic + 1) == 0


def test_graph_holds_the_launch_and_replays_with_new_contents() -> None:
    add = kernel("slow_add")
    x = torch.zeros(32, device="cuda")
    args = Pair(x.data_ptr(), x.data_ptr(), 0)
    add.launch((1, 1, 1), 32, 0, stream(), args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            add.launch((1, 1, 1), 32, 0, stream(), args)
    args.x = args.y = None  # the graph has its own copy
    assert x.tolist() == [1.0] * 32
    x.fill_(10.0)
    graph.replay()
    assert x.tolist() == [13.0] * 32


_COLD = """
import torch
from kda_jit import jit
from kda_jit.errors import CaptureError
text = 'extern "C" __global__ void cold() {}'
target = jit.arch_for(torch.cuda.get_device_capability()).target
spec = jit.KernelSpec("cold.cu", ("cold",), target, text=text)
torch.zeros(1, device="cuda")
graph = torch.cuda.CUDAGraph()
words = ""
with torch.cuda.graph(graph):
    x = torch.zeros(4, device="cuda")
    try:
        jit.load(spec, 0)
    except CaptureError as error:
        words = str(error)
graph.replay()  # the refusal has not broken the capture around it
kernel = jit.load(spec, 0).kernels["cold"]
kernel.launch((1, 1, 1), 32, 0, torch.cuda.current_stream().cuda_stream)
torch.cuda.synchronize()
print(words)
"""


def test_cold_first_call_in_a_capture_is_refused_in_a_fresh_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COLD],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kda_jit.warmup" in done.stdout


def test_cold_first_call_in_a_capture_is_refused_here() -> None:
    spec = jit.KernelSpec("sm80/never_read.cu", ("x",), "sm_90a")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(4, device="cuda")
        with pytest.raises(CaptureError, match=r"kda_jit\.warmup"):
            jit.load(spec, 0)


def test_target_of_another_gpu_is_refused_with_words() -> None:
    target = "sm_80" if torch.cuda.get_device_capability()[0] != 8 else "sm_90a"
    with pytest.raises(LaunchError, match=rf"{target} runs on .*this device is"):
        kernel("nothing", target=target)


def test_fresh_thread_launches_without_having_touched_cuda() -> None:
    add = kernel("slow_add")
    x = torch.zeros(32, device="cuda")
    torch.cuda.synchronize()
    args = Pair(x.data_ptr(), x.data_ptr(), 0)
    raw = stream()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            add.launch((1, 1, 1), 32, 0, raw, args)
        except BaseException as error:
            errors.append(error)

    for _ in range(4):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert errors == []
    assert x.tolist() == [4.0] * 32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("order", [(1, 0, 1), (0, 1, 0)])
def test_devices_in_any_order_whatever_the_current_one(order: tuple[int, ...]) -> None:
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in order:
                check_echo(device)
                x = torch.zeros(32, device=f"cuda:{device}")
                args = Pair(x.data_ptr(), x.data_ptr(), 1000)
                kernel("slow_add", device).launch((1, 1, 1), 32, 0, stream(device), args)
                assert x.tolist() == [1.0] * 32
                assert kernel("smem", device).max_active_blocks(128, 1000) > 0
                assert torch.cuda.current_device() == current


def test_cupy_allocates_nothing_and_the_current_device_stays() -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    held = pool.total_bytes()
    before = torch.cuda.current_device()
    check_echo()
    assert pool.total_bytes() == held
    assert torch.cuda.current_device() == before


def test_device_answers_for_itself() -> None:
    assert jit.device_unavailable_reason(0) is None


def test_warm_launch_costs_single_digit_microseconds() -> None:
    """The median, so that a busy host does not fail it; CuPy's launcher would double it."""
    add = kernel("slow_add")
    x = torch.zeros(32, device="cuda")
    args = Pair(x.data_ptr(), x.data_ptr(), 0)
    raw = stream()
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            add.launch((1, 1, 1), 32, 0, raw, args)
        times.append((time.perf_counter() - start) / 20)
    median = sorted(times)[25] * 1e6
    print(f"launch: {median:.2f} us")
    assert median < 10
