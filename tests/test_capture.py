"""Live calls in files: the call stays the same, and the file is the call."""

from __future__ import annotations

import errno
import itertools
import json
import tempfile
import warnings

import pytest
import torch

import kda_jit
from kda_jit import capturing
from kda_jit.backends.torch import TorchBackend
from kda_jit.callfile import read_call
from kda_jit.errors import InputError, InputTypeError
from kda_jit.replay import exact, replay, same_bits
from kda_jit.settings import SETTINGS
from kda_jit.snapshot import compact
from kda_jit.testing import Case

pytest.importorskip("safetensors", reason="capturing needs safetensors")

H, D = 2, 32
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch, tmp_path):
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setattr(capturing, "recorder", None)
    monkeypatch.chdir(tmp_path)


def tokens(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(T=40, **more):
    """Arguments whose tokens share one storage, as in README."""
    q, k, v, g = tokens(4, 1, T, H, D)
    found = {"q": q, "k": k, "v": v, "g": g, "beta": tokens(1, T, H, seed=1)}
    return (
        found | {"A_log": torch.zeros(H), "dt_bias": torch.zeros(H, D), "backend": "torch"} | more
    )


def pool_call():
    return call(
        cu_seqlens=torch.tensor([0, 20, 20, 33], dtype=torch.int32),  # and seven rows of padding
        initial_state=tokens(9, H, D, D, seed=2, dtype=torch.float32),
        state_indices=torch.tensor([7, -1, 2]),
        has_initial_state=torch.tensor([True, True, False]),
        checkpoint_state=torch.zeros(3, H, D, D),
        checkpoint_offsets=torch.tensor([16, 0, 0], dtype=torch.int32),
    )


def step_call():
    return call(
        T=5,
        cu_seqlens=torch.tensor([0, 3, 5, 5], dtype=torch.int32),
        state_pool=tokens(8, H, D, D, seed=2),
        state_indices=torch.tensor([[6, 1, 4], [0, 5, 0], [0, 0, 0]], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([1, 2, 1], dtype=torch.int32),
        null_index=0,
    )


def fresh_call():
    """Sequence 0 starts from nothing, whatever its slot holds."""
    found = step_call() | {"has_initial_state": torch.tensor([False, True, False])}
    found["state_pool"][6] = torch.nan
    return found


def strided():
    wide = tokens(1, 40, 3 * H, D, seed=4)
    return call(q=wide[:, :, :H], k=wide[:, :, H : 2 * H], v=wide[:, :, 2 * H :], scale=0.5)


CALLS = {
    "plain": (kda_jit.prefill, call),
    "padded_pool": (kda_jit.prefill, pool_call),
    "strided": (kda_jit.prefill, strided),
    "one_tensor_twice": (kda_jit.prefill, lambda: call(k=call()["q"])),
    "bf16_states_in_place": (
        kda_jit.prefill,
        lambda: call(**dict.fromkeys(("initial_state", "final_state"), tokens(1, H, D, D))),
    ),
    "unbounded": (kda_jit.prefill, lambda: call(lower_bound=None)),
    "verification": (kda_jit.recurrent, step_call),
    "decode": (
        kda_jit.recurrent,
        lambda: call(
            T=1, state_pool=tokens(4, H, D, D, dtype=torch.float32), state_indices=torch.tensor([3])
        ),
    ),
    "read_only": (kda_jit.recurrent, lambda: step_call() | {"write_state": False}),
    "fresh": (kda_jit.recurrent, fresh_call),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_captured_call_is_the_call_and_replays_to_the_same_bits(name, tmp_path):
    function, build = CALLS[name]
    plain, tapped = build(), build()
    want = function(**plain)
    with kda_jit.capture(tmp_path / "new" / "folder") as recorder:
        got = function(**tapped)
    for a, b in zip(
        want if isinstance(want, tuple) else (want,), got if isinstance(got, tuple) else (got,)
    ):
        rows = slice(None, 33) if name == "padded_pool" and a is want[0] else slice(None)
        assert torch.equal(a[:, rows], b[:, rows])
    for key, x in plain.items():
        assert not isinstance(x, torch.Tensor) or torch.equal(x, tapped[key]), key

    (file,) = recorder.files
    again = read_call(file, "cpu")
    assert again.function == function.__name__
    assert again.facts["backend"] == "torch"
    replay(again, "torch")  # once more beforehand: it must leave the call as it is
    results = replay(again, "torch")
    assert results.keys() == again.results.keys()
    for key, live in again.results.items():
        assert same_bits(again, key, results[key], live), key
        assert live.dtype == results[key].dtype


def test_of_a_pool_only_the_slots_in_use_are_kept(tmp_path):
    arguments = pool_call()
    before = arguments["initial_state"].clone()
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(**arguments)
    found = read_call(recorder.files[0], "cpu")
    assert found.slots == [2, 7]
    assert found.arguments["state_indices"].tolist() == [1, -1, 0]
    assert torch.equal(found.arguments["initial_state"], before[[2, 7]])
    assert torch.equal(found.results["final_state"], arguments["initial_state"][[2, 7]])


def test_options_and_origin_are_in_the_metadata(tmp_path):
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(**strided() | {"lower_bound": -2.5})
    found = read_call(recorder.files[0], "cpu")
    assert (found.arguments["lower_bound"], found.arguments["scale"]) == (-2.5, 0.5)
    assert found.facts["kernels"] == "torch_chunk16"
    assert found.facts["kda_jit"] == kda_jit.__version__
    assert found.facts["torch"] == str(torch.__version__)
    assert json.loads(found.facts["strides"])["q"] == [3 * 40 * H * D, 3 * H * D, D, 1]
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(**call(lower_bound=None))
    assert read_call(recorder.files[0], "cpu").arguments["lower_bound"] is None


def test_slots_without_a_place_stay_without_one():
    indices = torch.tensor([[5, -3, 9], [2, 5, 12]], dtype=torch.int32)
    slots, found = compact(indices, 9, null=2)
    assert slots.tolist() == [5]
    assert found.tolist() == [[0, -1, 1], [-1, 0, 4]]
    assert found.dtype == torch.int32
    none = torch.tensor([-1])
    with torch.device("meta"):  # a default device, such as models are built under
        assert compact(none, 3)[0].tolist() == [0]


def test_calls_are_counted(tmp_path):
    with kda_jit.capture(tmp_path, calls=2, skip=1) as recorder:
        for scale in (0.1, 0.2, 0.3, 0.4):
            kda_jit.prefill(**call(scale=scale))
            kda_jit.prefill(**call(T=0))
    assert [read_call(f, "cpu").arguments["scale"] for f in recorder.files] == [0.2, 0.3]
    assert sorted(tmp_path.iterdir()) == sorted(recorder.files)


def test_the_innermost_block_sees_its_calls_alone(tmp_path):
    with kda_jit.capture(tmp_path) as outer:
        with kda_jit.capture(tmp_path) as inner:
            kda_jit.prefill(**call())
        assert (len(outer.files), len(inner.files)) == (0, 1)
        kda_jit.prefill(**call())
    kda_jit.prefill(**call())
    assert (len(outer.files), len(inner.files)) == (1, 1)


def test_blocks_of_several_threads_end_in_any_order(tmp_path):
    first, second = kda_jit.capture(tmp_path), kda_jit.capture(tmp_path)
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    kda_jit.prefill(**call())
    second.__exit__(None, None, None)
    kda_jit.prefill(**call())
    assert (len(one.files), len(two.files)) == (0, 1)
    assert capturing.recorder is None


def test_processes_of_one_number_and_second_keep_their_files(tmp_path, monkeypatch):
    for _ in range(2):
        monkeypatch.setattr(capturing, "_numbers", itertools.count())
        with kda_jit.capture(tmp_path) as recorder:
            kda_jit.prefill(**call())
    assert len(list(tmp_path.iterdir())) == 2
    assert recorder.files[0].name.startswith("prefill-")


def test_a_call_without_a_token_is_none_even_where_it_clears_slots(tmp_path):
    pool = tokens(3, H, D, D, dtype=torch.float32)
    fresh = {"state_indices": torch.tensor([1]), "has_initial_state": torch.tensor([False])}
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(**call(T=0, initial_state=pool, **fresh))
    assert recorder.files == []
    assert not pool[1].any()


def test_a_large_call_is_left_out_with_one_warning(tmp_path):
    with kda_jit.capture(tmp_path, max_bytes=40_000) as recorder:
        with pytest.warns(
            RuntimeWarning, match=r"it takes 0\.1 MiB, and 0\.0 MiB are allowed \(max"
        ):
            kda_jit.prefill(**call(T=100))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kda_jit.prefill(**call(T=120))
            kda_jit.prefill(**call(T=16))
    assert len(recorder.files) == 1
    assert recorder.files[0].stat().st_size < 40_000 + 4096


def test_the_size_is_that_of_the_slots_in_use(tmp_path):
    arguments = pool_call() | {"initial_state": torch.zeros(2000, H, D, D)}
    with warnings.catch_warnings(), kda_jit.capture(tmp_path, max_bytes=200_000) as recorder:
        warnings.simplefilter("error")
        kda_jit.prefill(**arguments)
    assert len(recorder.files) == 1


def test_inside_a_graph_capture_nothing_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ran = []
    recorder = capturing.Recorder(tmp_path, calls=range(4))
    with pytest.warns(RuntimeWarning, match="inside a CUDA graph capture"):
        recorder.around(torch.device("cuda"), lambda: pytest.fail("copied"), lambda: ran.append(1))
    assert ran == [1]
    assert recorder.files == []


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    folder = tmp_path / "calls"
    with kda_jit.capture(folder) as recorder:
        folder.rmdir()
        with pytest.warns(RuntimeWarning, match="a call is not captured in"):
            out, _ = kda_jit.prefill(**call())
    assert torch.equal(out, kda_jit.prefill(**call())[0])
    assert recorder.files == []


def test_a_call_that_fails_is_written_with_its_error(tmp_path, monkeypatch):
    def fail(self, problem, workspace):
        raise ValueError("broken on purpose")

    monkeypatch.setattr(TorchBackend, "run", fail)
    failing = pytest.raises(ValueError, match="broken on purpose")
    with kda_jit.capture(tmp_path) as recorder, failing:
        kda_jit.prefill(**call())
    found = read_call(recorder.files[0], "cpu")
    assert found.facts["error"] == "ValueError: broken on purpose"
    assert found.results == {}


def test_chunk_kda_is_captured_where_it_is_a_prefill(tmp_path):
    given = {name: call()[name] for name in ("q", "k", "v", "g", "beta")}
    raw = {"A_log": torch.zeros(H), "dt_bias": torch.zeros(H * D), "lower_bound": -5.0}
    raw |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel"), True)
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.chunk_kda(**given, **raw, use_beta_sigmoid_in_kernel=True, safe_gate=True)
        assert len(recorder.files) == 1
        with pytest.warns(RuntimeWarning, match="its inputs come activated"):
            kda_jit.chunk_kda(**given | {"g": -given["g"].abs().float()})
    assert len(recorder.files) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"calls": 0}, "calls, skip: expected at least 1 and at least 0, got 0 and 0"),
        ({"skip": -1}, "calls, skip: expected at least 1 and at least 0, got 4 and -1"),
        ({"max_bytes": 0}, "max_bytes: expected at least 1, got 0"),
        ({"calls": None}, "calls: expected an int, got NoneType"),
        ({"skip": "1"}, "skip: expected an int, got str"),
        ({"max_bytes": 1e6}, "max_bytes: expected an int, got float"),
    ],
)
def test_options_are_checked(tmp_path, options, words):
    refused = pytest.raises((InputError, InputTypeError), match=words)
    with refused, kda_jit.capture(tmp_path, **options):
        pass


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(InputError, match="folder: expected one that can be written")
    with refused, kda_jit.capture(tmp_path / "file"):
        pass


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with kda_jit.capture("calls") as recorder:
        monkeypatch.chdir("elsewhere")
        kda_jit.prefill(**call())
    assert [file.parent for file in recorder.files] == [tmp_path / "calls"]


def test_a_folder_that_takes_no_file_is_refused_at_once(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    refused = pytest.raises(InputError, match=r"folder: expected .*Permission denied")
    with refused, kda_jit.capture(tmp_path):
        pass


# -- by the environment --------------------------------------------------------------------------


def test_the_environment_captures_the_calls_it_names(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_JIT_CAPTURE", str(tmp_path / "calls"))
    monkeypatch.setenv("KDA_JIT_CAPTURE_CALLS", "1:3")
    monkeypatch.setattr(capturing, "recorder", capturing._AsTheEnvironmentSays())
    for scale in (0.1, 0.2, 0.3, 0.4):
        kda_jit.prefill(**call(scale=scale))
    files = sorted((tmp_path / "calls").iterdir())
    assert [read_call(f, "cpu").arguments["scale"] for f in files] == [0.2, 0.3]


def test_first_calls_of_several_threads_share_one_recorder(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_JIT_CAPTURE", str(tmp_path))
    monkeypatch.setenv("KDA_JIT_CAPTURE_CALLS", "1")
    tap = capturing._AsTheEnvironmentSays()
    monkeypatch.setattr(capturing, "recorder", tap)
    assert tap._settle() is tap._settle() is capturing.recorder
    monkeypatch.setattr(capturing, "recorder", tap)
    with capturing.unseen():
        kda_jit.prefill(**call())
    assert list(tmp_path.iterdir()) == []
    kda_jit.prefill(**call())
    assert len(list(tmp_path.iterdir())) == 1


def test_without_a_word_the_first_call_turns_it_off(monkeypatch, tmp_path):
    monkeypatch.setattr(capturing, "recorder", capturing._AsTheEnvironmentSays())
    kda_jit.recurrent(**step_call())
    assert capturing.recorder is None


def test_a_size_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_JIT_CAPTURE", str(tmp_path))
    monkeypatch.setenv("KDA_JIT_CAPTURE_MIB", "1")
    monkeypatch.setattr(capturing, "recorder", capturing._AsTheEnvironmentSays())
    with pytest.warns(RuntimeWarning, match="and 1.0 MiB are allowed .*KDA_JIT_CAPTURE_MIB"):
        kda_jit.prefill(**call(T=2100))
    assert list(tmp_path.iterdir()) == []


# -- the recurrence over a file ------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_the_exact_result_is_near_in_every_part(name, tmp_path):
    function, build = CALLS[name]
    with kda_jit.capture(tmp_path) as recorder:
        function(**build())
    found = read_call(recorder.files[0], "cpu")
    want = exact(found)
    assert want.keys() == found.results.keys()
    for key, x in want.items():
        assert x.dtype == torch.float64
        live = found.results[key]
        rows = slice(None, 33) if name == "padded_pool" and key == "out" else slice(None)
        torch.testing.assert_close(live[:, rows].double(), x[:, rows], atol=2e-2, rtol=2e-2)


def test_a_captured_case_of_the_laws_replays(tmp_path):
    x = Case(seed=3, lengths=(17, 0, 48), heads=2, value_heads=4, regime="slow").tensors(head_dim=D)
    with kda_jit.capture(tmp_path) as recorder:
        out, _ = kda_jit.prefill(*x.args, **x.kwargs)
    assert torch.equal(replay(read_call(recorder.files[0], "cpu"))["out"], out)
