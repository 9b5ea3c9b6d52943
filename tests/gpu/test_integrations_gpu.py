"""The stand-ins on a GPU: beside vLLM's compiled extension, in graphs, in the caller's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kda_jit
from kda_jit import settings
from kda_jit.errors import DeviceError, IntegrationError, WorkspaceError
from kda_jit.integrations import flash_kda, vllm
from kda_jit.reference import recurrent_kda
from kda_jit.testing import Case, Limit, assert_close
from kda_jit.testing.numeric import plain_loss

pytestmark = pytest.mark.gpu

REPO = Path(__file__).resolve().parents[2]
D = 128
REDZONE = 4096

#: What both can do: as many heads of v as of q, no empty sequence. `cuts`: tokens before each
#: sequence's checkpoint, 0 for none.
SIDE_BY_SIDE = [
    (Case(seed=1, lengths=(1, 15, 16, 17, 31, 33, 64, 200), heads=4), None),
    (Case(seed=2, lengths=(300, 17, 64, 5), heads=16, state_dtype="bfloat16"), None),
    (Case(seed=3, lengths=(700, 2, 129, 48), heads=4, initial=False), None),
    (Case(seed=4, lengths=(2048,), heads=2), None),
    (Case(seed=5, lengths=(130, 16, 49, 33), heads=4), (48, 16, 0, 32)),
    (Case(seed=6, lengths=(64, 200, 20), heads=4, state_dtype="bfloat16"), (0, 192, 16)),
    (Case(seed=7, lengths=(100, 28), heads=1), (96, 0)),
]
CASES = [case for case, _ in SIDE_BY_SIDE]

#: Runs every case through torch.ops._flashkda_C and saves the results; the same text on both sides.
SIDE = """
import sys, torch, kda_jit
from pathlib import Path
from kda_jit.testing import Case
side, library, target, device = {arguments!r}
if side == "ours":
    from kda_jit.integrations import vllm
    vllm.register()
else:
    from kda_jit.bench.peers import FlashKDA
    peer = FlashKDA(Path(library))
    if reason := peer.why_not():
        print("skip:", reason)
        sys.exit()
ops = torch.ops._flashkda_C
results = []
for case, cuts in {cases!r}:
    for width in (torch.int32, torch.int64):
        x = Case.parse(case).tensors(device)
        T, H = x.q.shape[1:3]
        dtype = getattr(torch, x.case.state_dtype)
        def states():
            return torch.full((x.N, H, 128, 128), torch.nan, dtype=dtype, device=device)
        beta = torch.full((1, T, 3 * H), torch.nan, dtype=torch.bfloat16, device=device)
        beta[..., H : 2 * H] = x.beta
        # As planned for a larger step, full of garbage.
        nbytes = ops.get_workspace_size(2 * T, H, x.N + 3)
        workspace = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
        out, final = torch.full_like(x.v, torch.nan), states()
        stored = None if cuts is None else states()
        offsets = None if cuts is None else torch.tensor(cuts, dtype=width, device=device)
        with torch.inference_mode():
            ops.fwd(
                x.q, x.k, x.v, x.g, beta[..., H : 2 * H], 128**-0.5, out, workspace, x.A_log,
                x.dt_bias, x.lower_bound, x.initial_state, final, x.cu_seqlens.to(width),
                stored, offsets,
            )
        if side == "ours":
            print(kda_jit.last_launch().backend)
        results.append([y if y is None else y.cpu() for y in (out, final, stored)])
torch.save(results, target)
"""


@pytest.fixture
def ops(monkeypatch):
    """Our operators; they are gone again afterwards."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for setting in (settings.BACKEND, settings.ARCH, settings.SCHEDULE):
        monkeypatch.delenv(setting.name, raising=False)
    try:
        vllm.register()
    except IntegrationError as error:
        pytest.skip(str(error))
    yield torch.ops._flashkda_C
    vllm.unregister()


def step(x, ops, **changes):
    """The arguments of one prefill in a workspace full of NaN between two red zones, and those."""
    T, H = x.q.shape[0] * x.q.shape[1], x.v.shape[2]
    nbytes = ops.get_workspace_size(T, H, x.N)
    block = torch.full((nbytes + 2 * REDZONE,), 0xFF, dtype=torch.uint8, device=x.q.device)
    arguments = {
        "q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "scale": D**-0.5,
        "out": torch.full_like(x.v, torch.nan), "workspace": block[REDZONE:-REDZONE],
        "A_log": x.A_log, "dt_bias": x.dt_bias, "lower_bound": x.lower_bound,
        "initial_state": x.initial_state,
        "final_state": torch.full((x.N, H, D, D), torch.nan, device=x.q.device),
        "cu_seqlens": x.cu_seqlens,
    }  # fmt: skip
    return arguments | changes, block


RAGGED = Case(seed=11, lengths=(0, 1, 17, 0, 33, 64, 100, 15, 0), heads=4, padding=7)


# -- beside the extension ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A function of `python`: the results of ours and of the extension's, each of its process."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    library = settings.flashkda_so() or REPO / ".peers" / "_flashkda_C.abi3.so"
    if not library.is_file():
        pytest.skip(
            f"needs vLLM's extension: {settings.FLASHKDA_SO.name}, or .peers/{library.name}"
        )
    folder = tmp_path_factory.mktemp("sides")
    found = {}

    def one(side, python):
        cases = [(repr(case), cuts) for case, cuts in SIDE_BY_SIDE]
        target = folder / f"{side}.pt"
        arguments = side, str(library), str(target), "cuda"
        said = python(SIDE.format(arguments=arguments, cases=cases), timeout=140.0)
        if said.startswith("skip:"):
            return said.strip()
        assert side == "theirs" or set(said.split()) == {"cuda"}, said
        return torch.load(target)

    def run(python):
        for side in ("ours", "theirs"):
            if side not in found:
                found[side] = one(side, python)
            if isinstance(found[side], str):
                pytest.skip(found[side])
        return found["ours"], found["theirs"]

    return run


@pytest.mark.parametrize("index", range(2 * len(CASES)))
def test_results_are_those_of_the_extension(both, python, monkeypatch, index):
    for setting in (settings.BACKEND, settings.ARCH, settings.SCHEDULE):
        monkeypatch.delenv(setting.name, raising=False)
    ours, theirs = (results[index] for results in both(python))
    case, cuts = SIDE_BY_SIDE[index // 2]
    x = case.tensors()
    offsets = None if cuts is None else torch.tensor(cuts)
    want = recurrent_kda(*x.args, **x.kwargs, checkpoint_offsets=offsets)
    loss = plain_loss(x, want)
    rounding = 4e-3 if case.state_dtype == "bfloat16" else 0.0
    state_limit = Limit(loss.state).allowed + 2 * rounding
    for name, got, other, exact, limit in [
        ("out", ours[0], theirs[0], want.out, Limit(loss.out)),
        ("final_state", ours[1], theirs[1], want.final_state, state_limit),
        ("checkpoint_state", ours[2], theirs[2], want.checkpoint_state, 2 * state_limit),
    ]:
        if got is None:
            continue
        if name == "checkpoint_state":
            asked = offsets > 0
            assert got[~asked].isnan().all(), "a row without a checkpoint was written"
            got, other, exact = got[asked], other[asked], exact[asked]
        assert got.isfinite().all(), name
        ends = x.cu_seqlens if name == "out" else None
        assert_close(name, got, exact, limit, cu_seqlens=ends, case=case)
        assert_close(name, got, other.double(), limit, cu_seqlens=ends, case=case)


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_both_widths_of_offsets_give_the_same_bits(both, python, side):
    results = both(python)[side == "theirs"]
    for narrow, wide in zip(results[::2], results[1::2]):
        for a, b in zip(narrow, wide):
            assert (a is None and b is None) or torch.equal(a.nan_to_num(), b.nan_to_num())


# -- ours alone ----------------------------------------------------------------------------------


def test_each_schedule_stays_in_the_callers_memory(ops, cuda):
    x, want = cuda.exact(RAGGED)
    got, block = step(x, ops)
    ops.fwd(**got)
    launch = kda_jit.last_launch()
    wanted = cuda.schedule_for(x.q.shape[1], x.N, 4)
    assert (launch.backend, launch.schedule) == ("cuda", wanted)
    cuda.check(x, want, got["out"], got["final_state"])
    assert got["out"][:, -7:].isnan().all()
    assert (block[:REDZONE] == 0xFF).all() and (block[-REDZONE:] == 0xFF).all()
    # `fused` needs none for fewer heads than it has pairs of SMs.
    assert bool((got["workspace"] != 0xFF).any()) is (wanted != "fused")
    plain, state = cuda.prefill(x, out=torch.full_like(x.v, torch.nan))
    assert torch.equal(plain.nan_to_num(), got["out"].nan_to_num())
    assert torch.equal(state, got["final_state"])


def test_a_step_allocates_nothing(ops):
    x = RAGGED.tensors("cuda")
    got, _ = step(x, ops)
    ops.fwd(**got)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    ops.fwd(**got)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_captured_step_follows_its_inputs(ops):
    x = RAGGED.tensors("cuda")
    other = RAGGED.replace(seed=12, lengths=(64, 0, 33, 17, 1, 15, 0, 0, 100)).tensors("cuda")
    static = {
        name: y.clone() if isinstance(y, torch.Tensor) else y for name, y in step(x, ops)[0].items()
    }
    ops.fwd(**static)  # the first call of all compiles, which a capture refuses
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fwd(**static)
    for y in (other, x):
        eager, _ = step(y, ops)
        ops.fwd(**eager)
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"):
            static[name].copy_(eager[name])
        for name in ("out", "final_state"):
            static[name].fill_(torch.nan)
        static["workspace"].fill_(0xFF)
        graph.replay()
        assert torch.equal(static["out"].nan_to_num(), eager["out"].nan_to_num())
        assert torch.equal(static["final_state"], eager["final_state"])


def test_one_workspace_on_one_stream_after_another(ops):
    """An engine warms up and captures beside the stream on which it serves."""
    x = RAGGED.tensors("cuda")
    first, _ = step(x, ops)
    ops.fwd(**first)
    second = first | {
        name: torch.full_like(first[name], torch.nan) for name in ("out", "final_state")
    }
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.fwd(**second)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(first["out"].nan_to_num(), second["out"].nan_to_num())
    assert torch.equal(first["final_state"], second["final_state"])


def test_a_compiled_step_is_the_eager_one(ops):
    x = RAGGED.replace(padding=0).tensors("cuda")

    def run(q, k, v, g, beta, *rest):
        ops.fwd(q * 1.0, k, v, g, beta, *rest)
        return rest[1] + 1.0

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager, graph = step(x, ops)[0], step(x, ops)[0]
    with torch.inference_mode():
        want, got = run(*eager.values()), compiled(*graph.values())
    assert torch.equal(got, want)
    assert torch.equal(graph["final_state"], eager["final_state"])


def test_opcheck(ops):
    got, _ = step(Case(seed=13, lengths=(5, 0, 40), heads=2).tensors("cuda"), ops)
    got["out"].zero_()
    got["final_state"].zero_()
    got["workspace"].zero_()
    checked = torch.library.opcheck(
        ops.fwd.default,
        tuple(got.values()),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    assert set(checked.values()) == {"SUCCESS"}


def test_a_workspace_elsewhere_or_too_small_is_refused(ops):
    got, _ = step(RAGGED.tensors("cuda"), ops)
    with pytest.raises(DeviceError, match="workspace: expected one on cuda:0"):
        ops.fwd(**got | {"workspace": got["workspace"].cpu()})
    with pytest.raises(WorkspaceError, match="workspace: expected a tensor of at least"):
        ops.fwd(**got | {"workspace": got["workspace"][1:]})
    assert got["out"].isnan().all()


@pytest.mark.parametrize("given", [False, True])
def test_flash_kda_runs_the_kernels(given, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for setting in (settings.BACKEND, settings.ARCH, settings.SCHEDULE):
        monkeypatch.delenv(setting.name, raising=False)
    x = RAGGED.tensors("cuda")
    out = torch.full_like(x.v, torch.nan)
    final = torch.full((x.N, 4, D, D), torch.nan, device="cuda")
    memory = None
    if given:
        nbytes = flash_kda.get_workspace_size(x.q.shape[1], 4, x.N)
        memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
    flash_kda.fwd(
        *x.args, D**-0.5, out, x.A_log, x.dt_bias, x.lower_bound, x.initial_state, final,
        x.cu_seqlens, memory,
    )  # fmt: skip
    assert kda_jit.last_launch().backend == "cuda"
    want, loss = x.reference(), plain_loss(x)
    assert_close("out", out, want.out, Limit(loss.out), cu_seqlens=x.cu_seqlens)
    assert_close("final_state", final, want.final_state, Limit(loss.state))
