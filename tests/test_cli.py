"""The commands of `kda-jit`, called as a person would, in process and on the CPU."""

import importlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

import kda_jit
from kda_jit.testing import Case

pytest.importorskip("typer", reason="the command needs typer")
pytest.importorskip("rich", reason="the command needs rich")

from typer.testing import CliRunner

from kda_jit import __main__ as entry
from kda_jit import extras
from kda_jit.backends.cuda import compile_specs
from kda_jit.cli import app, describe
from kda_jit.errors import CompileError
from kda_jit.jit.compiler import unavailable_reason

NEEDS_NVRTC = pytest.mark.skipif(
    unavailable_reason("sm_80") is not None,
    reason="no NVRTC: install kda_jit[cuda12] or [cuda13]",
)
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(*words) -> text; asserts the exit code, 0 unless `code` says otherwise."""
    monkeypatch.setenv("KDA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.fixture
def main(monkeypatch, capsys):
    """main(*words) -> (exit code or message, printed), through the entry point itself."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kda-jit", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            entry.main()
        return stop.value.code, capsys.readouterr().out

    return run


def test_help_names_every_command(call):
    text = call("--help")
    for command in describe():
        assert re.search(rf"^\W*{command.usage.split()[0]}\b", text, re.MULTILINE)
    assert "..." not in text.partition("Commands:")[2], (
        "a sentence is cut: give the command a short_help"
    )
    usages = {c.usage.partition(" [")[0] for c in describe()}
    assert usages == {
        "doctor", "info", "explain", "compile", "cache info", "cache clear", "run INPUTS",
        "compare A B INPUTS", "verify", "bench", "demo",
    }  # fmt: skip


def test_info(call, tmp_path):
    text = call("info")
    assert f"kda_jit            {kda_jit.__version__}\n" in text
    assert re.search(rf"^torch +{re.escape(torch.__version__.partition('+')[0])}", text, re.M)
    assert re.search(r"^kernels_src +\S+kernels_src$", text, re.M)
    assert f"{tmp_path / 'cache'}, 0 kernels, 0 bytes" in text
    assert re.search(r"^(cuda:0|gpu) ", text, re.M)


@CPU_ONLY
def test_explain_on_a_cpu(call):
    lines = call("explain").splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["cuda", "no"], ["triton", "no"], ["torch", "yes"],
    ]  # fmt: skip
    assert "needs a CUDA device" in lines[0]
    assert lines[3] == "backend torch"


def test_explain_for_another_gpu_gives_every_reason(call):
    text = call(
        "explain", "--capability", "9.0", "--head-dim", 64, "--dtype", "fp16", "--unbounded"
    )
    reasons = re.search(r"^cuda    no   (.*)$", text, re.M)[1]
    assert "K = 64" in reasons
    assert "float16" in reasons or "fp16" in reasons
    assert "lower_bound" in reasons or "bounded" in reasons


@NEEDS_NVRTC
def test_explain_honours_what_the_environment_forces(call, monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_JIT_ARCH", "sm_80")
    monkeypatch.setenv("KDA_JIT_SCHEDULE", "portable")
    text = call("explain", "--capability", "8.6")
    assert text.endswith(
        "backend cuda\nKDA_JIT_ARCH: builds for sm_80, not for sm_86\n"
        "KDA_JIT_SCHEDULE: takes the schedule portable, whatever the sizes\n"
    )
    assert "KDA_JIT" not in call("explain", "--capability", "9.0", "--head-dim", 64)


@NEEDS_NVRTC
def test_explain_says_what_the_environment_forces_in_vain(call, monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_JIT_ARCH", "sm_100a")
    monkeypatch.setenv("KDA_JIT_SCHEDULE", "hopper")
    monkeypatch.setenv("KDA_JIT_KERNELS_SRC", str(tmp_path))
    text = call("explain", "--capability", "9.0", code=1)
    fails = "the call would fail: "
    assert f"KDA_JIT_ARCH: {fails}sm_100a runs on 10.0 alone; this device is 9.0" in text
    assert f"KDA_JIT_SCHEDULE: {fails}hopper runs on 9.x, the target is sm_100a" in text
    assert f"KDA_JIT_KERNELS_SRC: {fails}{tmp_path} has no sm80/kda_prefill.cu" in text


def test_version(call):
    assert call("--version") == f"kda_jit {kda_jit.__version__}\n"


@CPU_ONLY
@pytest.mark.parametrize("words", [("--backend", "cuda"), ("--device", "cuda")])
def test_verify_says_plainly_that_there_is_no_gpu(call, words):
    text = call("verify", *words, code=2)
    assert "torch finds no GPU here" in text
    assert "K = " not in text


def test_explain_of_a_backend_that_cannot(call):
    text = call("explain", "--device", "cpu", "--backend", "cuda", code=1)
    assert "NoBackendError" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "words, message",
    [
        (["explain", "--capability", "9"], "InputError: capability: expected major.minor"),
        (["explain", "--lower-bound", "-6"], "InputError: lower_bound: expected None or a number"),
        (["explain", "--lower-bound", "0"], "InputError: lower_bound: expected None or a number"),
        (["explain", "--head-dim", "0"], "InputError: head_dim, value_head_dim: expected at least"),
        (["compile", "--arch", "sm_90"], "InputError: target: expected one of"),
        (["compile", "--arch", "sm_110a"], "InputError: arch: expected one that there are kernels"),
        (["run", "nowhere.safetensors"], "InputError: inputs: expected a safetensors file"),
        (["explain", "--backend", "tritn"], None),
    ],
)
def test_an_error_is_a_sentence(main, words, message):
    code, _ = main(*words)
    if message is None:
        assert code == 1
    else:
        assert code.startswith(message)


def test_missing_package_names_the_extra(main, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kda_jit.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(extras, "_ROOT", Path("/site-packages"))
    code, _ = main("info")
    assert code == "The command needs typer: pip install 'kda_jit[cli]'"


@NEEDS_NVRTC
def test_compile_and_cache(call):
    text = call("compile", "--arch", "sm_80")
    line = r"^sm_80 +(?:sm80/\S+ +)?(\w+) +(\d+) +(\d+) +(\d+)(?: +([\d.]+))? *$"
    rows = re.findall(line, text, re.M)
    assert {"kda_prepare", "kda_recurrence"} <= {row[0] for row in rows}
    for _, registers, spilt, _, _ in rows:
        assert 16 <= int(registers) <= 255
        assert int(spilt) == 0
    assert float(rows[0][4]) > 0.1
    assert "cached" in call("compile", "--arch", "sm_80")
    assert "cached" not in call("compile", "--arch", "sm_80", "--fresh")
    count = int(re.search(r"^entries +(\d+)$", call("cache", "info"), re.M)[1])
    assert count >= 1
    assert call("cache", "clear") == f"deleted   {count}\n"
    assert re.search(r"^entries +0$", call("cache", "info"), re.M)


@NEEDS_NVRTC
def test_compile_folds_no_name_in_80_columns(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = call("compile", "--arch", "sm_90a", "--arch", "compute_80")
    for name in ("sm90/kda_pipeline.cu ", "kda_recurrence_single ", "kda_pipeline_begin "):
        assert name in text


def test_without_nvrtc_compile_says_so_once(call, monkeypatch):
    def fail(spec, *, fresh=False):
        raise CompileError("NVRTC: CuPy cannot be imported")

    monkeypatch.setattr("kda_jit.jit.compiler.compile_spec", fail)
    text = call("compile", "--arch", "sm_90a", code=1)
    assert text.count("failed") == len(compile_specs("sm_90a"))
    assert text.count("CompileError: NVRTC: CuPy cannot be imported") == 1


def test_the_workbench_without_rich_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kda_jit.lab")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package rich: pip install "):
        importlib.import_module("kda_jit.lab")


@NEEDS_NVRTC
def test_compile_shows_the_error_and_builds_it_again_by_its_key(call, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    (folder / "sm80").mkdir(parents=True)
    (folder / "sm80" / "kda_prefill.cu").write_text("\n\nint x = smem_w;\n")
    monkeypatch.setenv("KDA_JIT_KERNELS_SRC", str(folder))
    text = call("compile", "--arch", "sm_80", code=1)
    assert 'kernels_src/sm80/kda_prefill.cu(3): error: identifier "smem_w" is undefined' in text
    again = re.search(r"redo: python -m kda_jit (compile --key [0-9a-f]{16})", text)[1]
    assert 'identifier "smem_w" is undefined' in call(*again.split(), code=1)


def write_inputs(path, inputs, metadata=None, **more):
    from safetensors.torch import save_file

    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    tensors = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
    save_file({k: x.contiguous() for k, x in (tensors | more).items()}, path, metadata=metadata)


def test_run_from_file_to_file(call, tmp_path):
    pytest.importorskip("safetensors", reason="run needs safetensors")
    from safetensors import safe_open

    x = Case(seed=1, lengths=(20, 0, 7), heads=2, regime="unbounded").tensors(head_dim=32)
    write_inputs(tmp_path / "in.safetensors", x, {"lower_bound": "none", "scale": "0.5"})
    text = call("run", "in.safetensors", "-o", "out.safetensors", "--device", "cpu")
    assert "out.safetensors: out [1, 27, 2, 32] bfloat16" in text
    want = kda_jit.prefill(*x.args, **x.kwargs | {"scale": 0.5})
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("out"), want[0])
        assert torch.equal(file.get_tensor("final_state"), want[1])
        assert file.metadata()["backend"] == kda_jit.last_launch().backend
    assert f"ran backend {kda_jit.last_launch().backend}" in text


def test_run_keeps_checkpoints(call, tmp_path):
    pytest.importorskip("safetensors", reason="run needs safetensors")
    from safetensors.torch import load_file

    x = Case(seed=2, lengths=(40,), heads=1).tensors(head_dim=32)
    checkpoint = torch.zeros(1, 1, 32, 32)
    offsets = torch.tensor([16], dtype=torch.int32)
    more = {"checkpoint_state": checkpoint, "checkpoint_offsets": offsets}
    write_inputs(tmp_path / "in.safetensors", x, **more)
    call("run", "in.safetensors", "--device", "cpu")
    got = load_file(tmp_path / "outputs.safetensors")["checkpoint_state"]
    assert torch.equal(
        got, kda_jit.prefill(*x.pack([(0, 0, 16)]).args, **x.pack([(0, 0, 16)]).kwargs)[1]
    )


def test_run_repeats_a_captured_call(call, tmp_path):
    pytest.importorskip("safetensors", reason="run needs safetensors")
    from safetensors.torch import load_file, save_file

    x = Case(seed=3, lengths=(20, 7), heads=2).tensors(head_dim=32)
    with kda_jit.capture(tmp_path) as recorder:
        kda_jit.prefill(*x.args, **x.kwargs, backend="torch")
        kda_jit.recurrent(
            *(y[:, :2].transpose(0, 1) for y in x.args),
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            state_pool=torch.zeros(4, 2, 32, 32),
            state_indices=torch.tensor([3, 1]),
            backend="torch",
        )
    text = call("run", recorder.files[0], "--device", "cpu", "--backend", "torch")
    assert "out: the same bits as the live call's" in text
    assert "final_state: the same bits as the live call's" in text
    text = call("run", recorder.files[1], "--device", "cpu", "--backend", "torch")
    assert "state_pool [2, 2, 32, 32] float32" in text
    assert "state_pool: the same bits as the live call's" in text
    assert "kernels torch_recurrent" in text

    changed = load_file(recorder.files[0])
    changed["result.out"][0, -1, 0, 0] += 1
    save_file(changed, tmp_path / "changed.safetensors", metadata={"scale": "none"})
    text = call("run", "changed.safetensors", "--device", "cpu", "--backend", "torch")
    assert "out: other bits than the live call's" in text


@pytest.mark.parametrize(
    "change, metadata, message",
    [
        ({"kk": torch.zeros(1)}, None, r"also has kk"),
        ({}, {"scale": "big"}, r"scale: expected a number or none in the metadata, got 'big'"),
    ],
)
def test_run_refuses_a_file_that_is_not_a_call(main, tmp_path, change, metadata, message):
    pytest.importorskip("safetensors", reason="run needs safetensors")
    path = tmp_path / "in.safetensors"
    write_inputs(path, Case(lengths=(4,)).tensors(head_dim=16), metadata, **change)
    code, _ = main("run", path)
    assert re.search(message, code)


def test_run_refuses_wrong_shapes_and_devices_in_words(main, tmp_path):
    pytest.importorskip("safetensors", reason="run needs safetensors")
    path = tmp_path / "in.safetensors"
    x = Case(lengths=(4,)).tensors(head_dim=16)
    write_inputs(path, x, {"state_dtype": "bfloat16"}, q=x.q[0].clone())
    code, _ = main("run", path, "--device", "cpu")
    assert code.startswith("InputError: q: expected [B, T, H, K]")
    for device in ("banana", "mps", "xpu"):
        code, _ = main("run", path, "--device", device)
        assert code.startswith(
            f"DeviceError: device: expected one that torch can use, got {device}"
        )


def test_run_refuses_a_place_that_cannot_be_written_before_it_runs(main, monkeypatch):
    pytest.importorskip("safetensors", reason="run needs safetensors")
    monkeypatch.setattr("kda_jit.jit.cache.why_not_writable", lambda place: "Read-only file system")
    code, _ = main("run", "nowhere.safetensors")
    assert code.startswith("InputError: output: expected a place to write to, got outputs.safeten")
    assert code.endswith("(Read-only file system).")


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch):
    from rich.console import Console

    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, "ascii"))
    monkeypatch.setattr("sys.argv", ["kda-jit", "cache", "info"])
    with pytest.raises(SystemExit):
        entry.main()
    Console().print("né\udcff")
    sys.stdout.flush()
    assert bytes_.getvalue().endswith(b"n\\xe9\\udcff\n")


def test_run_names_the_tensors_that_lack(main, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="run needs safetensors")
    safetensors.save_file({"q": torch.zeros(1)}, tmp_path / "in.safetensors")
    code, _ = main("run", tmp_path / "in.safetensors")
    assert "lacks k, v, g, beta, A_log, dt_bias" in code
    (tmp_path / "in.safetensors").write_text("not one")
    code, _ = main("run", tmp_path / "in.safetensors")
    assert code.startswith("InputError: inputs: expected a safetensors file, got")


def test_demo_checks_and_draws(call, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    text = call("demo", "--skip-compile", "--heads", 1)
    assert "300, 17, 0, 1024, 64 tokens" in text
    assert "wrong" not in text
    picture = tmp_path / "out" / "demo.png"
    assert "picture: out/demo.png" in text
    assert matplotlib.image.imread(picture).shape[2] in (3, 4)


def test_demo_fails_when_a_backend_is_off(call, monkeypatch):
    from kda_jit.backends.torch import TorchBackend

    right = TorchBackend.run

    def wrong(self, problem, workspace):
        right(self, problem, workspace)
        problem.out[0, -1] *= 1.5

    monkeypatch.setattr(TorchBackend, "run", wrong)
    assert "wrong" in call("demo", "--skip-compile", "--heads", 1, code=1)
