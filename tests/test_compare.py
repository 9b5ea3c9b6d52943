"""`kda-jit compare`: the planted fault is found where it is, and the nearer one is named."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

pytest.importorskip("typer", reason="the command needs typer")
pytest.importorskip("rich", reason="the command needs rich")
pytest.importorskip("safetensors", reason="captured calls are safetensors")

from typer.testing import CliRunner

import kda_jit
from kda_jit import __main__ as entry
from kda_jit import compare as work
from kda_jit.backends.torch import TorchBackend
from kda_jit.bench.peers import FlashKDA
from kda_jit.callfile import Call, read_call, write_call
from kda_jit.cli import app
from kda_jit.compare import CAPTURED, _initial_states, as_json, compare
from kda_jit.errors import BackendNameError, DeviceError, InputError
from kda_jit.replay import as_bytes
from kda_jit.testing import Case
from kda_jit.testing.verify import PeerRunner

H, D = 2, 32
BF16 = torch.bfloat16
CASE = Case(seed=5, lengths=(100, 0, 150), heads=H, regime="random", initial=True, padding=9)


@pytest.fixture
def live(tmp_path):
    """A captured prefill of two sequences that have tokens, one that has none, and padding."""
    x = CASE.tensors(head_dim=D)
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(*x.args, **x.kwargs, backend="torch")
    return recorder.files[0]


@pytest.fixture
def pooled(tmp_path):
    """One on a pool of bf16 states in slots 7 and 2, with a checkpoint."""
    x = Case(seed=6, lengths=(40, 5, 70), heads=H).tensors(head_dim=D)
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(
            *x.args,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            cu_seqlens=x.cu_seqlens,
            initial_state=torch.randn(9, H, D, D).to(torch.bfloat16),
            state_indices=torch.tensor([7, -1, 2]),
            has_initial_state=torch.tensor([False, True, True]),
            checkpoint_state=torch.zeros(3, H, D, D),
            checkpoint_offsets=torch.tensor([0, 0, 64]),
            backend="torch",
        )
    return recorder.files[0]


def changed(path, change):
    """The call of a file with other results."""
    call = read_call(path, "cpu")
    results = {name: x.clone() for name, x in call.results.items()}
    change(results)
    return Call(call.function, call.arguments, results, call.state_dtype, call.facts)


def run(*words, code=0):
    result = CliRunner().invoke(app, ["compare", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_a_backend_is_the_live_call(live):
    found = compare(read_call(live, "cpu"), CAPTURED, "torch")
    assert found.passed
    assert [o.name for o in found.outputs] == ["out", "final_state"]
    for output in found.outputs:
        assert output.same_bits
        assert output.nearer is None
        assert output.apart.worst == 0.0
        assert 0 < output.a.all <= output.a.worst <= output.allowed
    assert found.a.ran["kernels"] == found.b.ran["kernels"] == "torch_chunk16"


def test_a_fault_is_found_where_it_is(live):
    def spoil(results):
        results["out"][0, 100 + 70, 1] += 0.5  # token 70 of sequence 2: chunk 1
        results["final_state"][0, 1] *= 1.1

    found = compare(changed(live, spoil), "torch", CAPTURED)
    out, state = found.outputs
    assert out.b.place == out.apart.place == "sequence 2, head 1, chunk 1"
    assert state.b.place == "sequence 0, head 1"
    assert state.b.worst == pytest.approx(0.1, rel=1e-3)
    assert (out.nearer, state.nearer) == ("a", "a")
    assert not found.passed
    assert found.along.sequence == 2
    assert found.along.tokens[int(found.along.b.argmax())] == 72
    assert found.along.b.max() > 20 * found.along.a.max()
    chunk, head = divmod(int(found.along.blocks_b.argmax()), H)
    assert (chunk, head) == (1, 1)
    assert compare(changed(live, spoil), CAPTURED, "torch").outputs[0].nearer == "b"


def test_rows_of_padding_do_not_count(live):
    def spoil(results):
        results["out"][0, 250:] = torch.nan

    assert compare(changed(live, spoil), "torch", CAPTURED).outputs[0].same_bits


def test_slots_are_named_as_in_the_live_pool(pooled):
    def spoil(results):
        results["final_state"][1, 0] += 1.0
        results["checkpoint_state"][2, 1] *= 2.0
        results["checkpoint_state"][:2] = 7.0  # not written by the call: its offsets are 0

    out, state, checkpoint = compare(changed(pooled, spoil), "torch", CAPTURED).outputs
    assert out.same_bits
    assert state.b.place == "slot 7, head 0"
    assert state.a.worst <= state.allowed < state.b.worst
    assert checkpoint.b.place == "sequence 2, head 1"
    assert checkpoint.b.worst == pytest.approx(1.0, rel=1e-3)
    assert compare(read_call(pooled, "cpu"), CAPTURED, "auto").passed


def test_states_of_a_pool_are_those_that_each_sequence_starts_from(pooled):
    call = read_call(pooled, "cpu")
    states = _initial_states(call)
    assert torch.equal(states[2], call.arguments["initial_state"][0])  # slot 2 comes first
    assert not states[:2].any()  # told to start afresh, and without a slot


def test_a_verification_is_compared_by_slot(tmp_path):
    x = Case(seed=7, lengths=(3, 2), heads=H).tensors(head_dim=D)
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.recurrent(
            *x.args,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            cu_seqlens=x.cu_seqlens,
            state_pool=torch.randn(20, H, D, D),
            state_indices=torch.tensor([[11, 3, 5], [19, 8, -1]]),
            backend="torch",
        )
    out, pool = compare(read_call(recorder.files[0], "cpu"), CAPTURED, "torch").outputs
    assert out.same_bits and pool.same_bits
    assert out.allowed is None

    def spoil(results):
        results["state_pool"][-1, 1] += 1.0

    _, pool = compare(changed(recorder.files[0], spoil), CAPTURED, "torch").outputs
    assert pool.a.place == "slot 19, head 1"
    assert pool.nearer == "b"


def test_the_same_nan_on_both_sides_agrees_and_a_lone_one_does_not(live):
    call = read_call(live, "cpu")
    call.arguments["v"][0, 16, 0] = torch.nan  # where a chunk begins: those before stay finite
    found = compare(call, "torch", "torch")
    assert found.outputs[0].a.worst < 0.01
    found = compare(call, CAPTURED, "torch")
    assert found.outputs[0].a.worst == float("inf")


def test_what_cannot_be_compared_is_refused(live):
    call = read_call(live, "cpu")
    with pytest.raises(InputError, match="captured: expected a file with the results of a live"):
        compare(Call(call.function, call.arguments), CAPTURED, "torch")
    failed = Call(call.function, call.arguments, facts={"error": "RuntimeError: an illegal access"})
    with pytest.raises(InputError, match="got one of a call that raised RuntimeError: an illegal"):
        compare(failed, "torch", CAPTURED)
    with pytest.raises(BackendNameError, match="Did you mean 'torch'"):
        compare(call, "torh", "torch")


# -- other people's kernels ----------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the current folder with functions to compare."""
    (tmp_path / "my_kernels.py").write_text(
        """
import kda_jit

def right(q, k, v, g, beta, **kwargs):
    return kda_jit.prefill(q, k, v, g, beta, **kwargs, backend="torch")

def slow_decay(q, k, v, g, beta, **kwargs):
    return right(q, k, v, g - 0.1, beta, **kwargs)

def plain(
    q, k, v, g, beta, A_log, dt_bias,
    cu_seqlens=None, initial_state=None, lower_bound=-5.0, scale=None,
):
    if cu_seqlens is None:
        raise NotImplementedError("it has no batches")
    return right(**locals())

def spoils(q, k, v, g, beta, **kwargs):
    v.mul_(5)
    return right(q, k, v, g, beta, **kwargs)

buffers = []

def shared(q, k, v, g, beta, **kwargs):
    found = right(q, k, v, g, beta, **kwargs)
    if not buffers:
        buffers.extend(x.clone() for x in found)
    return tuple(b.copy_(x) for b, x in zip(buffers, found))

def shared_twice(q, k, v, g, beta, **kwargs):
    return tuple(x.mul_(2) for x in shared(q, k, v, g, beta, **kwargs))

def none(*args, **kwargs):
    pass

def three(*args, **kwargs):
    return (*right(*args, **kwargs), 3)

def numbers(*args, **kwargs):
    out, state = right(*args, **kwargs)
    return out.int(), state

def leaves(*args, **kwargs):
    raise SystemExit(0)

def sometimes(q, k, v, g, beta, **kwargs):
    if "state_indices" in kwargs:
        raise RuntimeError("out of memory")
    return right(q, k, v, g, beta, **kwargs)

def transposed(q, k, v, g, beta, **kwargs):
    out, state = right(q, k, v, g, beta, **kwargs)
    return out, state[:, :1]
"""
    )
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_kernels", None)


@pytest.mark.usefixtures("mine")
def test_a_function_is_a_side(live, pooled):
    found = compare(read_call(live, "cpu"), "my_kernels:right", CAPTURED)
    assert found.passed and all(o.same_bits for o in found.outputs)
    assert found.a.title == "my_kernels:right"
    found = compare(read_call(live, "cpu"), "torch", "my_kernels:slow_decay")
    assert not found.passed
    assert [o.nearer for o in found.outputs] == ["a", "a"]
    found = compare(read_call(pooled, "cpu"), "my_kernels:right", CAPTURED)
    assert [o.name for o in found.outputs] == ["out", "final_state", "checkpoint_state"]
    assert found.passed and all(o.same_bits for o in found.outputs)


@pytest.mark.usefixtures("mine")
def test_what_a_function_cannot_do_is_said(live, pooled, tmp_path):
    call = read_call(live, "cpu")
    assert compare(call, "my_kernels:plain", "torch").passed
    with pytest.raises(
        InputError, match=r"my_kernels:plain: .*without states in slots of a pool .*has no"
    ):
        compare(read_call(pooled, "cpu"), "torch", "my_kernels:plain")
    given = {name: x for name, x in call.arguments.items() if name != "cu_seqlens"}
    dense = Call("prefill", given | {"initial_state": given["initial_state"][:1]})
    with pytest.raises(InputError, match="got one it refuses: it has no batches"):
        compare(dense, "my_kernels:plain", "torch")
    with pytest.raises(
        InputError, match=r"my_kernels:transposed: expected results .*got .*1, 1, 32"
    ):
        compare(dense, "my_kernels:transposed", "torch")
    with pytest.raises(InputError, match="expected module:function, got 'my_kernels:absent'"):
        compare(call, "my_kernels:absent", "torch")
    with pytest.raises(InputError, match="device: expected a CUDA GPU for 'peer:flashkda'"):
        compare(call, "torch", "peer:flashkda")
    with kda_jit.capture(tmp_path / "steps") as recorder:
        x = Case(seed=7, lengths=(3, 2), heads=H).tensors(head_dim=D)
        kda_jit.recurrent(
            *x.args,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            cu_seqlens=x.cu_seqlens,
            state_pool=torch.randn(20, H, D, D),
            state_indices=torch.tensor([[11, 3, 5], [19, 8, -1]]),
            backend="torch",
        )
    with pytest.raises(InputError, match="expected a call of prefill, got one of recurrent"):
        compare(read_call(recorder.files[0], "cpu"), "my_kernels:right", "torch")


@pytest.mark.usefixtures("mine")
def test_what_a_function_does_to_its_inputs_and_results_is_its_own_affair(live):
    call = read_call(live, "cpu")
    before = {n: x.clone() for n, x in call.arguments.items() if isinstance(x, torch.Tensor)}
    for pair in (("my_kernels:spoils", "torch"), ("torch", "my_kernels:spoils")):
        found = compare(call, *pair)
        own = "a" if pair[0] != "torch" else "b"
        assert [getattr(o, f"excess_{own}") > 1 for o in found.outputs] == [True, True]
        assert not any(getattr(o, f"excess_{'ab'[own == 'a']}") > 1 for o in found.outputs)
        assert getattr(found, own).ran["wrote into"] == "v"
    assert all(torch.equal(as_bytes(x), as_bytes(call.arguments[n])) for n, x in before.items())
    found = compare(call, "my_kernels:shared_twice", "my_kernels:shared")
    assert [o.excess_a > 1 for o in found.outputs] == [True, True]
    assert [o.excess_b > 1 for o in found.outputs] == [False, False]
    assert not any(o.same_bits for o in found.outputs)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    "name, words",
    [
        ("none", "got NoneType"),
        ("three", r"got \(torch.bfloat16 on cpu, torch.float32 on cpu, int\)"),
        ("numbers", r"got \(torch.int32 on cpu, torch.float32 on cpu\)"),
        ("leaves", "results, got SystemExit: 0"),
    ],
)
def test_results_of_another_kind_are_a_sentence(live, name, words):
    with pytest.raises(InputError, match=f"my_kernels:{name}: expected .*{words}"):
        compare(read_call(live, "cpu"), "torch", f"my_kernels:{name}")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["breaks:f", "exits:f", ".my_kernels:right", "my_kernels:"])
def test_whatever_an_import_does_is_a_sentence(live, tmp_path, name):
    (tmp_path / "breaks.py").write_text("raise RuntimeError('no GPU')")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    with pytest.raises(InputError, match=f"expected module:function, got '{re.escape(name)}'"):
        compare(read_call(live, "cpu"), "torch", name)


def test_short_sequences_do_not_excuse_a_long_one():
    """Of a single token whose q is orthogonal to its k rounding leaves nothing."""
    generator = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=generator).to(BF16)  # noqa: E731
    T, N = 300, 200
    x = r(1, T, 4, 32)
    ends = torch.cat([torch.arange(N + 1), torch.tensor([T])]).int()
    arguments = {"q": x, "k": r(1, T, 4, 32), "v": r(1, T, 4, 32), "g": r(1, T, 4, 32)}
    arguments |= {"beta": r(1, T, 4), "A_log": torch.zeros(4), "dt_bias": torch.zeros(128)}
    out, state = kda_jit.prefill(**arguments, cu_seqlens=ends, backend="torch")
    call = Call("prefill", arguments | {"cu_seqlens": ends}, {"out": out, "final_state": state})
    found = compare(call, CAPTURED, "torch").outputs[0]
    assert found.passed and found.allowed < 0.3
    out[:, N:] *= -1
    found = compare(call, CAPTURED, "torch").outputs[0]
    assert found.excess_a > 5 and found.excess_b < 1


def test_a_sequence_with_nan_excuses_no_other(live):
    call = read_call(live, "cpu")
    call.arguments["v"][0, 16, 0] = torch.nan
    found = compare(call, "torch", "torch")
    assert found.passed and found.outputs[0].unjudged > 0
    call.results["out"][0, 16:100, 0] = torch.nan
    call.results["final_state"][0, 0] = torch.nan
    assert compare(call, CAPTURED, "torch").outputs[0].excess_a < 1
    call.results["out"][0, 100:, 1] *= 2.0
    assert compare(call, CAPTURED, "torch").outputs[0].excess_a > 10


def test_replays_are_captured_nowhere(live, tmp_path, monkeypatch):
    with kda_jit.capture(tmp_path / "more") as recorder:
        compare(read_call(live, "cpu"), "torch", "torch")
    assert recorder.files == []


def test_a_peer_is_asked_for_what_it_has_alone(live, monkeypatch):
    """By a peer that stands in for FlashKDA: its library needs a GPU."""
    asked = []

    class Peer:
        name, lacks = "flashkda", FlashKDA.lacks

        def activate(self):
            pass

        def bind(self, x):
            asked.append(x)
            return lambda: exact_results

    monkeypatch.setattr(
        work, "find_subject", lambda name, device, flashkda: PeerRunner(Peer(), device)
    )
    call = read_call(live, "cpu")
    with pytest.raises(InputError, match=r"expected torch.bfloat16 and K = V = 128, got .*K = 32"):
        compare(call, "peer:flashkda", "torch")
    x = Case(seed=5, lengths=(64, 20), heads=1).tensors(head_dim=128)
    arguments = {n: y for n, y in x.kwargs.items() if y is not None}
    whole = Call("prefill", dict(zip("qkvg", x.args, strict=False)) | {"beta": x.beta} | arguments)
    want = kda_jit.prefill(*x.args, **x.kwargs, backend="torch")
    exact_results = want
    found = compare(whole, "peer:flashkda", "torch")
    assert found.passed and found.outputs[0].same_bits and len(asked) == 1
    dense = {n: y for n, y in whole.arguments.items() if n not in ("cu_seqlens", "initial_state")}
    with pytest.raises(
        InputError, match="without batches without cu_seqlens, got one: the adapter"
    ):
        compare(Call("prefill", dense), "peer:flashkda", "torch")
    half = Call("prefill", whole.arguments, state_dtype=BF16)
    with pytest.raises(InputError, match="without an initial state in bf16, got one"):
        compare(half, "torch", "peer:flashkda")


@pytest.mark.parametrize("state, checkpoint", [(torch.float32, BF16), (BF16, torch.float32)])
def test_each_state_may_be_as_far_off_as_its_own_dtype(tmp_path, state, checkpoint):
    x = Case(seed=8, lengths=(64,), heads=H).tensors(head_dim=D, dtype=torch.float32)
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(
            *x.args,
            **x.kwargs,
            final_state=torch.zeros(1, H, D, D, dtype=state),
            checkpoint_state=torch.zeros(1, H, D, D, dtype=checkpoint),
            checkpoint_offsets=torch.tensor([32]),
            backend="torch",
        )
    found = compare(read_call(recorder.files[0], "cpu"), CAPTURED, "torch")
    assert found.passed
    assert [o.allowed < 1e-4 for o in found.outputs] == [True, state != BF16, checkpoint != BF16]


def test_the_rounding_of_a_bf16_state_is_no_fault(tmp_path):
    """Not even the worst there is: every element half way between two numbers of bf16."""
    x = Case(seed=9, lengths=(16,), heads=H).tensors(head_dim=D, dtype=torch.float32)
    kept = {"k": torch.zeros_like(x.k), "g": torch.full_like(x.g, -80.0)}
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(
            x.q, kept["k"], x.v, kept["g"], x.beta, A_log=x.A_log, dt_bias=x.dt_bias,
            initial_state=torch.full((1, H, D, D), 1.0 + 2.0**-8),
            final_state=torch.zeros(1, H, D, D, dtype=BF16),
            backend="torch",
        )  # fmt: skip
    found = compare(read_call(recorder.files[0], "cpu"), CAPTURED, "torch")
    assert found.outputs[1].a.worst == pytest.approx(2.0**-8, rel=1e-2)
    assert found.passed


def test_where_nan_leaves_no_bound_nothing_is_judged(live, tmp_path):
    call = read_call(live, "cpu")
    call.arguments["v"][0, 16, 0] = torch.nan
    write_call(tmp_path / "nan.safetensors", Call(call.function, call.arguments))
    text = run("torch", "auto", tmp_path / "nan.safetensors", "-o", tmp_path, "--device", "cpu")
    assert "final_state: the same bits; rounding explains " in text
    assert "; 1 blocks without a bound not judged\n" in text


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda results: results.pop("final_state"), r"got {'out': \[1, 259, 2, 32\]}"),
        (lambda results: results.update(out=results["out"][:, 1:]), r"got .*'out': \[1, 258"),
        (lambda results: results.update(other=results["out"]), r"got .*'other'"),
    ],
)
def test_results_of_another_call_are_refused(live, change, words):
    with pytest.raises(InputError, match=f"captured: expected results .*final_state.* {words}"):
        compare(changed(live, change), "torch", CAPTURED)


def test_slots_that_are_not_those_of_the_pool_are_refused(pooled):
    call = read_call(pooled, "cpu")
    for text in ("2", "2,x", ""):
        call.facts["slots"] = text
        with pytest.raises(InputError, match=f"slots: expected .* 2 rows of initial_.* {text!r}"):
            _ = call.slots


# -- the command ---------------------------------------------------------------------------------


def test_the_command_says_who_ran_and_who_is_nearer(live, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    right = TorchBackend.run

    def wrong(self, problem, workspace):
        right(self, problem, workspace)
        problem.out[0, 240] *= 1.5

    monkeypatch.setattr(TorchBackend, "run", wrong)
    text = run("captured", "torch", live, "-o", tmp_path / "new", "--device", "cpu", code=1)
    assert "prefill: q [1, 259, 2, 32], v [1, 259, 2, 32], bfloat16\n" in text
    assert "A captured: ran backend torch, kernels torch_chunk16, date 20" in text
    assert "B torch: ran backend torch, kernels torch_chunk16\n" in text
    assert "out: A (captured) is nearer to float64; rounding explains" in text
    assert ", exceeded by B (torch)\n" in text
    assert "final_state: the same bits" in text
    found = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert found["outputs"][0]["nearer"] == "a"
    assert found["outputs"][0]["b"]["place"].startswith("sequence 2, head ")
    assert len(found["along"]["tokens"]) == len(found["along"]["apart"]) == 10
    picture = matplotlib.image.imread(tmp_path / "new" / "compare.png")
    assert picture.shape[0] > 500 and picture[..., :3].std() > 0.05


def test_a_word_that_is_no_side_is_refused_with_all_that_are(live):
    with pytest.raises(BackendNameError, match=r"'reference'\. Or captured: what the live"):
        run("reference", "torch", live, "--device", "cpu")


@pytest.mark.parametrize("length", range(1, 17))
def test_tensors_from_a_file_are_aligned_wherever_they_lie_in_it(live, tmp_path, length):
    call = read_call(live, "cpu")
    call.facts["note"] = "x" * length
    write_call(tmp_path / "noted.safetensors", call)
    found = read_call(tmp_path / "noted.safetensors", "cpu").arguments.values()
    assert not any(x.data_ptr() % 16 for x in found if isinstance(x, torch.Tensor))


def test_an_output_that_is_a_file_is_refused(live):
    for place in (live, live / "below"):
        with pytest.raises(InputError, match=f"output: expected a folder to write to, got {place}"):
            run("torch", "captured", live, "-o", place)


def test_infinities_and_nan_are_text_in_the_json(live, tmp_path):
    def spoil(results):
        results["out"][0, 5, 0] = torch.nan

    call = changed(live, spoil)
    write_call(tmp_path / "nan.safetensors", call)
    run("torch", "captured", tmp_path / "nan.safetensors", "-o", tmp_path, code=1)
    text = (tmp_path / "compare.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["outputs"][0]["b"]["worst"] == "inf"
    assert found["along"]["b"][0] == "nan"


def test_nothing_is_written_unasked(live, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    run("torch", "captured", live, "--device", "cpu")
    assert sorted(tmp_path.iterdir()) == before


def test_a_call_without_a_token_has_no_picture(live, tmp_path):
    call = read_call(live, "cpu")
    given = {name: x for name, x in call.arguments.items() if name != "cu_seqlens"}
    given |= {name: given[name][:, :0] for name in ("q", "k", "v", "g", "beta")}
    given |= {"initial_state": given["initial_state"][:1]}
    write_call(tmp_path / "empty.safetensors", Call("prefill", given))
    text = run("torch", "auto", tmp_path / "empty.safetensors", "-o", tmp_path, "--device", "cpu")
    assert "nothing to compare" in text
    assert not (tmp_path / "compare.png").exists()
    found = compare(read_call(tmp_path / "empty.safetensors", "cpu"), "torch", "torch")
    assert as_json(found)["along"] is None


@pytest.mark.usefixtures("mine")
def test_a_folder_is_a_line_a_call_the_worst_last(live, pooled, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    calls = tmp_path / "calls"
    (calls / "later").mkdir(parents=True)
    write_call(calls / "a.safetensors", changed(live, lambda results: None))
    write_call(calls / "later" / "b.safetensors", changed(pooled, lambda results: None))
    write_call(calls / "c.safetensors", changed(live, lambda r: r["out"].mul_(1.5)))
    text = run("torch", "captured", calls, "-o", tmp_path / "new", "--device", "cpu", code=1)
    lines = [line.split(maxsplit=4) for line in text.splitlines() if "safetensors" in line]
    assert {line[4].partition(":")[0] for line in lines[:2]} == {
        "a.safetensors",
        "later/b.safetensors",
    }
    assert lines[2][3] == "A"
    assert lines[2][4].startswith("TOO FAR     c.safetensors: out, sequence ")
    assert "3 calls: A nearer to float64 in 1, B in 0, alike in 2" in text
    assert "further than rounding explains in 1; not judged, or in part: 0; not made: 0" in text
    found = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert [c["file"] for c in found["calls"]][-1] == "c.safetensors"
    assert found["passed"] is False
    assert (tmp_path / "new" / "compare.png").exists()
    (calls / "c.safetensors").unlink()
    run("torch", "captured", calls, "--device", "cpu")

    text = run("torch", "my_kernels:sometimes", calls, "--device", "cpu", code=1)
    assert "later/b.safetensors: RuntimeError: out of memory" in text
    assert "a.safetensors: " in text
    with pytest.raises(DeviceError, match="device: expected one that torch can use, got bogus"):
        run("torch", "captured", calls, "--device", "bogus")

    (calls / "bad.safetensors").write_bytes(b"no")
    text = run("torch", "captured", calls, "--device", "cpu", code=1)
    assert "bad.safetensors: InputError: " in text
    assert "not made: 1" in text
    with pytest.raises(InputError, match=r"inputs: expected a folder with \*.safetensors, got"):
        run("torch", "captured", tmp_path / "new")
    with pytest.raises(InputError, match="expected module:function, got 'my_kernels:absent'"):
        run("torch", "my_kernels:absent", calls, "--device", "cpu")
    with pytest.raises(BackendNameError, match="Or captured: "):
        run("torhc", "torch", calls, "--device", "cpu")


def test_an_error_is_a_sentence(live, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["kda-jit", "compare", "cuda", "torch", str(live), "--device", "cpu"]
    )
    with pytest.raises(SystemExit, match="NoBackendError: backend='cuda': expected a call that"):
        entry.main()
