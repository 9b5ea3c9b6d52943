"""vLLM's FlashKDA operators: declared as the extension declares them, and refused beside it."""

import ast
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kda_jit
from kda_jit import settings
from kda_jit.errors import GradError, InputError, IntegrationError, WorkspaceError
from kda_jit.integrations import flash_kda, vllm
from kda_jit.reference import recurrent_kda
from kda_jit.testing import Case, Limit, assert_close
from kda_jit.testing.numeric import plain_loss
from kda_jit.workspace import planned_bytes, workspace_specs

ROOT = Path(__file__).resolve().parent.parent
D = 128
FWD = (
    "_flashkda_C::fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) "
    "out, Tensor(c!) workspace, Tensor A_log, Tensor dt_bias, float lower_bound, Tensor? "
    "initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, Tensor(d!)? "
    "checkpoint_state=None, Tensor? checkpoint_offsets=None) -> ()"
)
SIZE = "_flashkda_C::get_workspace_size(int T_total, int H, int N=1) -> int"
PRINT_SCHEMAS = """
for name in ("get_workspace_size", "fwd"):
    print(getattr(torch.ops._flashkda_C, name).default._schema)
"""
RAGGED = Case(seed=3, lengths=(0, 1, 15, 0, 17, 33, 64, 48), heads=2, padding=5)


@pytest.fixture
def ops():
    """The operators, which are gone again afterwards: the extension may be measured later on."""
    try:
        vllm.register()
    except IntegrationError as error:
        pytest.skip(str(error))
    yield torch.ops._flashkda_C
    vllm.unregister()


def python(script, path=(), **environment):
    """The finished process of a script; it has neither our variables nor, unasked, our plugin."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KDA_JIT_")}
    env["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", "import torch\n" + script],
        env=env | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def step(x, ops, **changes):
    """The 16 arguments of one prefill, as vLLM's layers pass them, and results full of NaN."""
    T, H = x.q.shape[0] * x.q.shape[1], x.v.shape[2]
    arguments = {
        "q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "scale": D**-0.5,
        "out": torch.full_like(x.v, torch.nan),
        "workspace": torch.full((ops.get_workspace_size(T, H, x.N),), 0xFF, dtype=torch.uint8),
        "A_log": x.A_log, "dt_bias": x.dt_bias, "lower_bound": x.lower_bound,
        "initial_state": x.initial_state,
        "final_state": torch.full((x.N, H, D, D), torch.nan), "cu_seqlens": x.cu_seqlens,
        "checkpoint_state": None, "checkpoint_offsets": None,
    }  # fmt: skip
    return arguments | changes


# -- the schema ----------------------------------------------------------------------------------


def test_schemas_are_those_of_vllm(ops):
    assert str(ops.fwd.default._schema) == FWD
    assert str(ops.get_workspace_size.default._schema) == SIZE
    written = {a.name for a in ops.fwd.default._schema.arguments if a.is_write}
    assert written == {"out", "workspace", "final_state", "checkpoint_state"}


def extension():
    """FlashKDA's library as it comes inside vLLM's wheel, if one is here."""
    path = settings.flashkda_so() or ROOT / ".peers" / "_flashkda_C.abi3.so"
    if not path.is_file():
        pytest.skip(f"needs vLLM's _flashkda_C.abi3.so: there is no {path.name} in .peers")
    return path


@pytest.fixture(scope="module")
def loading(tmp_path_factory):
    """(a line of Python that loads the real extension, the environment in which it can).

    Without a driver, or with a torch for the CPU, empty libraries take the places of those that
    its kernels would call: enough to load it, not to run it.
    """
    path = extension()
    line = f"torch.ops.load_library({str(path.resolve())!r})\n"
    done = python(line)
    if done.returncode == 0:
        return line, {}
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(
            f"the extension does not load, and there is no C compiler: {done.stderr[-300:]}"
        )
    folder = tmp_path_factory.mktemp("stubs")
    stubs = {"libcuda.so.1": "int kda_jit_stub;"}
    if torch.version.cuda is None:
        stubs["libtorch_cuda.so"] = "int aoti_torch_get_current_cuda_stream(int i, void** s);\n"
        stubs["libtorch_cuda.so"] += (
            "int aoti_torch_get_current_cuda_stream(int i, void** s) { *s = 0; return i & 0; }"
        )
    for name, code in stubs.items():
        (folder / "stub.c").write_text(code)
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name]
        subprocess.run([*command, folder / "stub.c"], check=True, timeout=60)
    known = os.environ.get("LD_LIBRARY_PATH", "")
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), known]))}
    done = python(line, **environment)
    if done.returncode:
        pytest.skip(f"the extension does not load here: {done.stderr[-300:]}")
    return line, environment


def test_the_library_holds_our_very_schemas():
    """Needs no loader: the declarations lie in the library as text."""
    content = extension().read_bytes()
    for schema in vllm.SCHEMAS.values():
        assert b"\0" + schema.encode() + b"\0" in content


def test_schemas_equal_those_of_the_loaded_extension(loading):
    line, environment = loading
    real = python(line + PRINT_SCHEMAS, **environment)
    assert real.returncode == 0, real.stderr
    ours = python("from kda_jit.integrations import vllm\nvllm.register()\n" + PRINT_SCHEMAS)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == real.stdout == f"{SIZE}\n{FWD}\n"


# -- results -------------------------------------------------------------------------------------


def check(x, got, *, checkpoints=None):
    assert kda_jit.last_launch().backend == ("cuda" if x.q.is_cuda else "torch")
    want = recurrent_kda(*x.args, **x.kwargs, checkpoint_offsets=checkpoints)
    loss = plain_loss(x, x.reference())
    limit = Limit(loss.state).allowed
    limit += 4e-3 if got["final_state"].dtype is torch.bfloat16 else 0.0
    assert_close("out", got["out"], want.out, Limit(loss.out), cu_seqlens=x.cu_seqlens)
    assert_close("final_state", got["final_state"], want.final_state, limit)
    if checkpoints is not None:
        asked = checkpoints > 0
        state = got["checkpoint_state"]
        assert_close("checkpoint_state", state[asked], want.checkpoint_state[asked], 2 * limit)
        assert state[~asked].isnan().all(), "a row without a checkpoint was written"


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_a_ragged_step(ops, width, state):
    x = RAGGED.replace(state_dtype=state).tensors()
    got = step(x, ops, cu_seqlens=x.cu_seqlens.to(width))
    got["final_state"] = got["final_state"].to(getattr(torch, state))
    kept = {n: y.clone() for n, y in got.items() if isinstance(y, torch.Tensor)}
    assert ops.fwd(*got.values()) is None
    check(x, got)
    assert got["out"][:, -5:].isnan().all(), "rows past the last token were written"
    for name in kept.keys() - {"out", "final_state", "workspace"}:
        assert torch.equal(got[name].nan_to_num(), kept[name].nan_to_num()), f"{name} changed"


def test_a_step_in_planned_buffers(ops):
    """Slices of buffers for the largest step, beta a column of a wider projection."""
    x = RAGGED.tensors()
    T, H = x.q.shape[1:3]
    workspace = torch.full((ops.get_workspace_size(4 * T, H, 3 * x.N),), 0xFF, dtype=torch.uint8)
    wide = torch.full((1, T, 5 * H), torch.nan, dtype=torch.bfloat16)
    wide[..., H : 2 * H] = x.beta
    out = torch.full((1, 4 * T, H, D), torch.nan, dtype=torch.bfloat16)
    states = torch.full((3 * x.N, H, D, D), torch.nan)
    got = step(
        x, ops, beta=wide[..., H : 2 * H], out=out[:, :T], workspace=workspace,
        final_state=states[: x.N],
    )  # fmt: skip
    assert not got["beta"].is_contiguous()
    ops.fwd(**got)
    check(x, got)
    assert out[:, T:].isnan().all() and states[x.N :].isnan().all()


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_checkpoints_are_the_states_of_the_cut_sequences(ops, width):
    x = RAGGED.tensors()
    offsets = torch.tensor([0, 0, 0, 0, 16, 32, 64, 16], dtype=width)
    empty = torch.full((x.N, 2, D, D), torch.nan)
    got = step(x, ops, checkpoint_state=empty, checkpoint_offsets=offsets)
    got["cu_seqlens"] = got["cu_seqlens"].to(width)
    ops.fwd(**got)
    check(x, got, checkpoints=offsets)
    for n in offsets.nonzero().flatten().tolist():
        cut = x.pack([(n, 0, int(offsets[n]))])
        alone = step(cut, ops)
        ops.fwd(**alone)
        assert torch.equal(alone["final_state"][0], got["checkpoint_state"][n])


def test_states_gathered_from_a_pool_and_scattered_back(ops):
    """What an engine does around the operator is what kda_jit.prefill does on the pool itself."""
    x = RAGGED.tensors()
    slots = torch.tensor([9, 2, 5, 0, 7, 11, 3, 8])
    fresh = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    pool = torch.full((12, 2, D, D), torch.nan)
    pool[slots[~fresh]] = x.initial_state[~fresh]
    ours = pool.clone()
    gathered = torch.where(fresh.view(-1, 1, 1, 1), 0.0, pool[slots])
    got = step(x, ops, initial_state=gathered)
    ops.fwd(**got)
    check(x.replace(initial_state=gathered), got)
    pool[slots] = got["final_state"]
    kwargs = x.kwargs | {"initial_state": ours}
    out, _ = kda_jit.prefill(
        *x.args, **kwargs, state_indices=slots, has_initial_state=~fresh, backend="torch"
    )
    assert torch.equal(ours.nan_to_num(7.0), pool.nan_to_num(7.0))
    assert torch.equal(out[:, :-5], got["out"][:, :-5])


def test_optional_arguments_may_be_left_out(ops):
    x = Case(seed=5, lengths=(40, 40), heads=2, initial=False, packed=False).tensors()
    got = step(x, ops)
    required = list(got.values())[:11]
    ops.fwd(*required)
    loss = plain_loss(x)
    assert_close("out", got["out"], x.reference().out, Limit(loss.out))


def test_inference_mode_takes_parameters(ops):
    """A layer's parameters require grad; an engine runs without."""
    x = RAGGED.tensors()
    A_log = torch.nn.Parameter(x.A_log)
    got = step(x, ops, A_log=A_log)
    with pytest.raises(GradError, match="A_log: expected requires_grad=False"):
        ops.fwd(**got)
    assert got["out"].isnan().all()
    with torch.inference_mode():
        ops.fwd(**got)
    check(x, got)


# -- the callers in vLLM -------------------------------------------------------------------------


def caller(place, names):
    """The function `_flashkda_prefill` of a file of vLLM's, as it is there, in a scope of ours."""
    path = ROOT / ".peers" / "vllm_src" / "vllm" / "models" / place
    if not path.is_file():
        pytest.skip(f"needs vLLM's sources: unzip its vllm/models/{place} into .peers/vllm_src")
    tree = ast.parse("from __future__ import annotations\n" + path.read_text())
    (found,) = [n for n in ast.walk(tree) if getattr(n, "name", "") == "_flashkda_prefill"]
    scope = {"torch": torch} | names
    exec(compile(ast.Module([tree.body[0], found], []), str(path), "exec"), scope)
    return scope["_flashkda_prefill"]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def on_device(ops):
    """A step's tensors, parameters as a layer has them, and buffers for larger steps."""
    x = RAGGED.replace(padding=0).tensors(DEVICE)
    buffers = [
        ((8, 2, D, D), torch.float32),
        ((8, 2, D, D), torch.float32),
        ((ops.get_workspace_size(512, 2, 8),), torch.uint8),
        ((1, 512, 2, D), torch.bfloat16),
    ]
    A_log = torch.nn.Parameter(x.A_log)
    dt_bias = torch.nn.Parameter(x.dt_bias.flatten())
    offsets = torch.tensor([0, 0, 0, 0, 16, 32, 64, 16], dtype=torch.int32, device=DEVICE)
    with torch.inference_mode():
        yield x, A_log, dt_bias, buffers, offsets


def garbage(shape, dtype):
    return torch.full(
        shape, 0xFF if dtype is torch.uint8 else torch.nan, dtype=dtype, device=DEVICE
    )


def test_the_layer_of_kimi_k3_runs_as_it_is(on_device, monkeypatch):
    run = caller("kimi_k3/nvidia/kda.py", {})
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))  # its _flashkda_C is ours
    x, A_log, dt_bias, buffers, offsets = on_device
    final, stored, workspace, out = (garbage(*spec) for spec in buffers)
    out, state = run(
        *x.args, A_log=A_log, dt_bias=dt_bias, lower_bound=x.lower_bound,
        initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, out=out[:, : x.q.shape[1]],
        final_state=final, workspace=workspace, checkpoint_state=stored,
        checkpoint_offsets=offsets,
    )  # fmt: skip
    got = {"out": out, "final_state": state, "checkpoint_state": stored}
    check(x, got, checkpoints=offsets)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_layer_of_glm5next_runs_as_it_is(on_device, checkpoints):
    """Its output is in the engine's buffer, as in a step that verifies drafts, too."""
    x, A_log, dt_bias, buffers, offsets = on_device
    lent, exported = [], {}

    def get_simultaneous(*specs):
        lent.extend(garbage(*spec) for spec in specs)
        return lent

    manager = SimpleNamespace(get_simultaneous=get_simultaneous)
    run = caller("glm5next/common/kda.py", {"current_workspace_manager": lambda: manager})
    layer = SimpleNamespace(
        _flashkda_buffer_specs=buffers,
        _checkpoint_exporter=SimpleNamespace(export=lambda *_, **given: exported.update(given)),
        head_dim=D, A_log=A_log.view(1, 1, -1, 1), dt_bias=dt_bias, kda_lower_bound=x.lower_bound,
    )  # fmt: skip
    more = {}
    if checkpoints:
        more = {name: torch.empty(0) for name in ("raw_qkv", "conv_state", "recurrent_state")}
        more["checkpoint"] = SimpleNamespace(checkpoint_offsets=offsets)
    out, state = run(layer, *x.args, x.initial_state, x.cu_seqlens, None, **more)
    assert out.data_ptr() == lent[3].data_ptr()
    got = {"out": out, "final_state": state}
    got["checkpoint_state"] = exported.get("recurrent_checkpoint")
    check(x, got, checkpoints=offsets if checkpoints else None)


# -- torch's own machinery -----------------------------------------------------------------------


@pytest.mark.parametrize("checkpoints", [False, True])
def test_opcheck(ops, checkpoints):
    x = Case(seed=7, lengths=(5, 0, 40), heads=2).tensors()
    got = step(x, ops)
    if checkpoints:
        got["checkpoint_state"] = torch.zeros(3, 2, D, D)
        got["checkpoint_offsets"] = torch.tensor([0, 0, 32], dtype=torch.int32)
    got["out"].zero_()
    got["final_state"].zero_()
    checked = torch.library.opcheck(ops.fwd.default, tuple(got.values()))
    assert set(checked.values()) == {"SUCCESS"}


def test_a_compiled_step_is_the_eager_one(ops):
    x = RAGGED.replace(padding=0).tensors()

    def run(q, k, v, g, beta, *rest):
        ops.fwd(q * 1.0, k, v, g, beta, *rest)
        return rest[1] + 1.0

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager, graph = step(x, ops), step(x, ops)
    with torch.inference_mode():
        want, got = run(*eager.values()), compiled(*graph.values())
    assert torch.equal(got, want)
    assert torch.equal(graph["out"], eager["out"])
    assert torch.equal(graph["final_state"], eager["final_state"])


def test_tensors_without_data_are_followed(ops):
    got = step(RAGGED.tensors(), ops)
    meta = {n: y.to("meta") if isinstance(y, torch.Tensor) else y for n, y in got.items()}
    assert ops.fwd(**meta) is None
    assert got["out"].isnan().all()


# -- the workspace -------------------------------------------------------------------------------


def test_the_size_has_room_for_checkpoints(ops):
    for bounds in ((1, 1, 1), (16384, 16, 8), (8192, 96, 1024)):
        specs = workspace_specs(bounds[0], bounds[2], bounds[1], D, checkpoints=True)
        assert ops.get_workspace_size(*bounds) == planned_bytes(specs)
        assert ops.get_workspace_size(*bounds) > flash_kda.get_workspace_size(*bounds)
    assert ops.get_workspace_size(100, 2) == ops.get_workspace_size(100, 2, 1)
    with pytest.raises(InputError, match="T_total: expected at least 0, got -1"):
        ops.get_workspace_size(-1, 1, 1)


def test_a_step_beyond_the_plan_is_refused(ops):
    """More tokens or more sequences than the workspace was planned for."""
    x = RAGGED.tensors()
    T, H = x.q.shape[1:3]
    for planned in ((T - 32, H, x.N), (T, H, x.N - 1), (T, H - 1, x.N)):
        workspace = torch.empty(ops.get_workspace_size(*planned), dtype=torch.uint8)
        got = step(x, ops, workspace=workspace)
        words = (
            f"workspace: expected a tensor of at least {ops.get_workspace_size(T, H, x.N)} bytes"
        )
        with pytest.raises(WorkspaceError, match=words):
            ops.fwd(**got)
        assert got["out"].isnan().all() and got["final_state"].isnan().all()


# -- switching it on and off ---------------------------------------------------------------------


def test_registering_again_changes_nothing(ops):
    fwd = ops.fwd
    vllm.register()
    assert vllm.is_registered()
    assert torch.ops._flashkda_C.fwd is fwd


def test_unregistering_takes_everything_back():
    vllm.unregister()
    vllm.unregister()
    for _ in range(2):
        try:
            vllm.register()
        except IntegrationError as error:
            pytest.skip(str(error))
        assert vllm.MODULE in sys.modules
        assert torch.ops._flashkda_C.get_workspace_size(1, 1) > 0
        vllm.unregister()
        assert not vllm.is_registered() and vllm.MODULE not in sys.modules
        assert not hasattr(torch.ops._flashkda_C, "fwd")


def test_importing_the_module_registers_nothing():
    done = python(
        "import kda_jit.integrations.vllm as v, sys\n"
        "assert not v.is_registered() and v.MODULE not in sys.modules\n"
        "assert not hasattr(torch.ops._flashkda_C, 'fwd')\n"
        "assert not {'vllm', 'cupy'} & set(sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def engine(tmp_path):
    """A package named vllm whose extension must not be loaded."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_flashkda_C.py").write_text("raise SystemExit('the extension was loaded')\n")
    return tmp_path


def test_importing_the_extension_is_harmless_then(engine):
    """In either order of importing vllm and registering."""
    program = """
import importlib.util
from kda_jit.integrations import vllm as ours
{first}
ours.register()
import vllm._flashkda_C
assert vllm.__file__.startswith({folder!r})
assert importlib.util.find_spec("vllm._flashkda_C").origin == "kda_jit.integrations.vllm"
assert torch.ops._flashkda_C.get_workspace_size(1, 1, 1) > 0
"""
    for first in ("", "import vllm"):
        done = python(program.format(first=first, folder=str(engine)), path=[engine])
        assert done.returncode == 0, done.stderr


REFUSED = """
from kda_jit.integrations import vllm
import kda_jit, sys
before = dict(sys.modules)
for _ in range(2):
    try:
        vllm.register()
    except kda_jit.IntegrationError as error:
        print(error)
assert not vllm.is_registered()
assert sys.modules.get(vllm.MODULE) is before.get(vllm.MODULE)
"""


def test_operators_of_others_are_refused():
    before = """
theirs = torch.library.Library("_flashkda_C", "DEF")
theirs.define("fwd(Tensor q) -> ()")
"""
    done = python(before + REFUSED)
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one == two
    assert one.startswith(
        "vllm: expected a process without FlashKDA's extension, got torch.ops._flashkda_C.fwd "
        "loaded already."
    )
    assert "KDA_JIT_VLLM" in one


def test_a_loaded_module_is_refused():
    before = "import sys, types\nsys.modules['vllm._flashkda_C'] = types.ModuleType('x')\n"
    done = python(before + REFUSED)
    assert done.returncode == 0, done.stderr
    assert "got the module vllm._flashkda_C loaded already" in done.stdout


def test_the_real_extension_is_refused_once_loaded(loading):
    line, environment = loading
    done = python(line + REFUSED, **environment)
    assert done.returncode == 0, done.stderr
    assert "torch.ops._flashkda_C.get_workspace_size, torch.ops._flashkda_C.fwd" in done.stdout


def test_the_real_extension_loads_after_ours_is_gone(loading):
    line, environment = loading
    ours = "from kda_jit.integrations import vllm\nvllm.register()\nvllm.unregister()\n"
    done = python(ours + line + PRINT_SCHEMAS, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{SIZE}\n{FWD}\n"


# -- the plugin ----------------------------------------------------------------------------------

PLUGIN = """
import logging
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
from kda_jit.integrations import vllm
vllm.plugin()
vllm.plugin()
print(vllm.is_registered())
"""


@pytest.mark.parametrize("value, on", [("", False), ("off", False), ("on", True), ("1", True)])
def test_the_plugin_does_what_the_environment_says(value, on):
    done = python(PLUGIN, KDA_JIT_VLLM=value)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{on}\n"
    line = f"vllm.kda_jit: kda_jit {kda_jit.__version__} serves torch.ops._flashkda_C"
    assert (line in done.stderr) == on


def test_the_plugin_refuses_a_value_in_between(monkeypatch):
    monkeypatch.setenv("KDA_JIT_VLLM", "yes please")
    with pytest.raises(InputError, match="KDA_JIT_VLLM: expected on, off, 1 or 0"):
        vllm.plugin()


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["vllm.general_plugins"]["kda_jit"]
    point = importlib.metadata.EntryPoint("kda_jit", value, "vllm.general_plugins")
    assert point.load() is vllm.plugin


def test_the_log_line_is_below_vllms_logger(caplog, monkeypatch, ops):
    monkeypatch.setenv("KDA_JIT_VLLM", "on")
    with caplog.at_level(logging.INFO, logger="vllm"):
        vllm.plugin()
    (record,) = caplog.records
    assert record.name == "vllm.kda_jit"
