"""torch.ops.kda_jit on the CPU: truthful schemas, and compiled code that gives the eager bits."""

import inspect
import io
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import kda_jit
from kda_jit import api, ops
from kda_jit.errors import GradError, InputError, InputTypeError, NoBackendError
from kda_jit.reference import recurrent_kda

H, HV, D = 2, 4, 16
TOKENS = ("q", "k", "v", "g", "beta")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)
    torch._dynamo.reset()


def inputs(*lengths, B=1, T=None, dtype=torch.float32, seed=0, **more):
    """Arguments of a packed call; of a dense one of B rows if T is given."""
    torch.manual_seed(seed)
    packed = T is None
    T = sum(lengths) if packed else T
    x = {
        "q": torch.randn(B, T, H, D, dtype=dtype),
        "k": torch.randn(B, T, H, D, dtype=dtype),
        "v": torch.randn(B, T, HV, D, dtype=dtype),
        "g": torch.randn(B, T, HV, D, dtype=dtype),
        "beta": torch.randn(B, T, HV, dtype=dtype),
        "A_log": torch.randn(HV) * 0.1,
        "dt_bias": torch.randn(HV, D) * 0.1,
    }
    if packed:
        ends = torch.tensor([0, *lengths], dtype=torch.int32)
        x["cu_seqlens"] = ends.cumsum(0, dtype=torch.int32)
    return x | more


def columns(x):
    """The same numbers as column slices of wider tensors."""
    wide = {name: torch.cat([x[name], x[name]], 2)[:, :, : x[name].shape[2]] for name in TOKENS}
    assert not any(t.is_contiguous() for t in wide.values())
    return x | wide


def swapped(x):
    """The same numbers with the batch inside the tokens."""
    inside = {name: x[name].transpose(0, 1).contiguous().transpose(0, 1) for name in TOKENS}
    assert inside["v"].stride(0) < inside["v"].stride(1)
    return x | inside


def states(n, seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(n, HV, D, D).to(dtype)


def nothing(*shape):
    return torch.zeros(shape)


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def flags(*values):
    return torch.tensor(values)


PREFILL = {
    "packed": lambda: inputs(5, 17),
    "dense": lambda: inputs(B=2, T=19),
    "one sequence": lambda: inputs(33),
    "states": lambda: inputs(3, 0, 16, initial_state=states(3)),
    "fresh": lambda: inputs(3, 9, initial_state=states(2), has_initial_state=flags(True, False)),
    "bf16": lambda: inputs(5, 17, dtype=torch.bfloat16),
    "tokens outside": lambda: swapped(inputs(B=2, T=19)),
    "columns": lambda: columns(inputs(5, 17)),
    "unbounded": lambda: inputs(5, 17, lower_bound=None, scale=0.5, backend="torch"),
    "no tokens": lambda: inputs(0, 0, initial_state=states(2)),
}
INPLACE = {
    "final_state": lambda: inputs(
        5, 17, output=nothing(1, 22, HV, D), final_state=nothing(2, HV, D, D)
    ),
    "initial and final": lambda: inputs(
        5, 17, output=nothing(1, 22, HV, D), initial_state=states(2), final_state=states(2)
    ),
    "state": lambda: inputs(5, 17, output=nothing(1, 22, HV, D), state=states(2)),
    "pool": lambda: inputs(
        5,
        17,
        output=nothing(1, 22, 2 * HV, D)[:, :, :HV],
        state=states(4),
        state_indices=index(3, 0),
        has_initial_state=flags(False, True),
        checkpoint_state=nothing(2, HV, D, D),
        checkpoint_offsets=index(0, 16),
    ),
}
RECURRENT = {
    "decode": lambda: inputs(B=3, T=1, state_pool=states(5), state_indices=index(4, -1, 0)),
    "verify": lambda: inputs(
        2,
        3,
        state_pool=states(8),
        state_indices=index(1, 2, 3, 4, 5, 7).view(2, 3),
        num_accepted_tokens=index(2, 1),
        null_index=7,
    ),
    "fresh": lambda: inputs(
        B=3,
        T=1,
        state_pool=states(5),
        state_indices=index(4, 2, 0),
        has_initial_state=flags(True, False, True),
    ),
    "read only": lambda: inputs(
        B=2, T=3, read_only_pool=states(5, dtype=torch.bfloat16), state_indices=index(4, 0)
    ),
}


def checked(op, arguments):
    """opcheck raises where a schema, a fake or the compiled code differs from what runs."""
    tokens = tuple(arguments[name] for name in TOKENS)
    rest = {name: x for name, x in arguments.items() if name not in TOKENS}
    found = opcheck(op, tokens, rest)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", PREFILL)
def test_opcheck_prefill(case):
    checked(torch.ops.kda_jit.prefill.default, PREFILL[case]())


@pytest.mark.parametrize("case", INPLACE)
def test_opcheck_prefill_inplace(case):
    checked(torch.ops.kda_jit.prefill.inplace, INPLACE[case]())


@pytest.mark.parametrize("case", RECURRENT)
def test_opcheck_recurrent(case):
    arguments = RECURRENT[case]()
    checked(torch.ops.kda_jit.recurrent.default, arguments)
    checked(
        torch.ops.kda_jit.recurrent.inplace, arguments | {"output": nothing(*arguments["v"].shape)}
    )


def test_schemas_say_what_is_written_and_have_the_defaults_of_the_functions():
    for name, function in (("prefill", kda_jit.prefill), ("recurrent", kda_jit.recurrent)):
        public = inspect.signature(function).parameters
        for overload in ("default", "inplace"):
            op = getattr(getattr(torch.ops.kda_jit, name), overload)
            assert torch.Tag.needs_exact_strides in op.tags
            schema = op._schema
            arguments = {a.name: a for a in schema.arguments}
            assert "out" not in arguments, "Dynamo takes it for one of ATen's"
            written = {n for n, a in arguments.items() if a.is_write}
            assert (
                written
                == {
                    ("prefill", "default"): set(),
                    ("prefill", "inplace"): {"output", "final_state", "state", "checkpoint_state"},
                    ("recurrent", "default"): {"state_pool"},
                    ("recurrent", "inplace"): {"state_pool", "output"},
                }[name, overload]
            )
            for shared in public.keys() & arguments.keys() - {"state_pool"}:
                default = public[shared].default
                if default is not inspect.Parameter.empty:
                    assert arguments[shared].default_value == default, shared


def test_a_notebook_may_reload_or_import_the_package_anew():
    code = """
import importlib, sys, torch, kda_jit
x = torch.ones(1, 3, 1, 16)
call = lambda: torch.ops.kda_jit.prefill(
    x, x, x, x, x[..., 0], A_log=x[0, 0, :, 0], dt_bias=x[0, 0]
)[0]
first = call()
importlib.reload(kda_jit.ops)
assert call().equal(first)
for name in [name for name in sys.modules if name.partition(".")[0] == "kda_jit"]:
    del sys.modules[name]
import kda_jit as anew
assert anew is not kda_jit
assert call().equal(first)
assert anew.last_launch().backend == "torch"
assert torch.compile(anew.prefill, fullgraph=True, backend="aot_eager")(
    x, x, x, x, x[..., 0], A_log=x[0, 0, :, 0], dt_bias=x[0, 0]
)[0].equal(first)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr


# -- eager calls ---------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Names of our operators as they pass the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names, self.keywords = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kda_jit":
            self.names.append(str(func))
            self.keywords.append(kwargs)
        return func(*args, **(kwargs or {}))


def test_an_eager_call_meets_neither_the_dispatcher_nor_the_detour(monkeypatch):
    pool = states(2)
    tokens = inputs(B=2, T=1)
    monkeypatch.setattr(api, "another_way", lambda q: pytest.fail("a detour"))
    monkeypatch.setitem(
        kda_jit.recurrent.__globals__, "another_way", lambda q: pytest.fail("a detour")
    )
    with Seen() as seen:
        kda_jit.prefill(**inputs(5, 17))
        kda_jit.recurrent(**tokens, state_pool=pool, state_indices=index(0, 1))
    assert seen.names == []


def test_the_operators_called_by_hand_are_the_functions():
    arguments = inputs(5, 17)
    out, state = torch.ops.kda_jit.prefill(**arguments)
    want, want_state = kda_jit.prefill(**arguments)
    assert out.equal(want) and state.equal(want_state)
    exact = recurrent_kda(**arguments)
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), exact.final_state, rtol=1e-4, atol=1e-4)
    assert kda_jit.last_launch().backend == "torch"

    pool, by_hand = states(4), states(4)
    again = nothing(1, 22, HV, D)
    slots = index(3, 0)
    nothing_returned = torch.ops.kda_jit.prefill(
        **arguments, output=again, state=by_hand, state_indices=slots
    )
    assert nothing_returned is None
    out, _ = kda_jit.prefill(**arguments, initial_state=pool, state_indices=slots)
    assert again.equal(out) and by_hand.equal(pool)

    tokens = inputs(B=2, T=1)
    out = kda_jit.recurrent(**tokens, state_pool=pool, state_indices=slots)
    again = torch.ops.kda_jit.recurrent(**tokens, state_pool=by_hand, state_indices=slots)
    assert again.equal(out) and by_hand.equal(pool)
    fresh = {"state_indices": slots, "has_initial_state": flags(False, True)}
    pool[3] = by_hand[3] = torch.nan
    out = kda_jit.recurrent(**tokens, **fresh, state_pool=pool)
    again = torch.ops.kda_jit.recurrent(**tokens, **fresh, state_pool=by_hand)
    assert again.equal(out) and by_hand.equal(pool) and pool.isfinite().all()


@pytest.mark.parametrize(
    "op, changes, words",
    [
        (
            "prefill",
            {"output": nothing(1, 22, HV, D)},
            "final_state, state: expected one of the two",
        ),
        (
            "prefill",
            {"output": nothing(1, 22, HV, D), "state": states(2), "initial_state": states(2)},
            "state: expected neither",
        ),
        ("recurrent", {"state_indices": index(0, 1)}, "state_pool, read_only_pool: expected one"),
        (
            "recurrent",
            {"state_pool": states(2), "read_only_pool": states(2), "state_indices": index(0, 1)},
            "state_pool, read_only_pool: expected one",
        ),
    ],
)
def test_what_only_an_operator_can_be_asked_wrongly(op, changes, words):
    with pytest.raises(InputError, match=words):
        getattr(torch.ops.kda_jit, op)(**inputs(5, 17), **changes)


# -- compiled ------------------------------------------------------------------------------------


def prefill(**arguments):
    out, state = kda_jit.prefill(**arguments)
    return out * 2, state


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_prefill_has_the_eager_bits_and_one_graph_for_all_lengths(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(prefill, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    for lengths in ((5, 17), (3, 40, 1), (0, 64), (16, 16, 16, 16)):
        arguments = inputs(*lengths)
        got, want = compiled(**arguments), prefill(**arguments)
        assert got[0].equal(want[0]) and got[1].equal(want[1])
        exact = recurrent_kda(**arguments)
        torch.testing.assert_close(got[0].double(), 2 * exact.out, rtol=1e-4, atol=2e-4)
        counts.add(counter.frame_count)
    assert len(counts) == 1 and counts != {0}


def view_of_a_pool(pool, wide, **arguments):
    """Writes columns of one input and slots of another, and reads both afterwards."""
    before = pool.amax()
    out, returned = kda_jit.prefill(
        **arguments,
        out=wide[:, 3:25, :HV],
        initial_state=pool,
        state_indices=arguments["cu_seqlens"][1:] // 16,
        checkpoint_state=pool.new_zeros(2, HV, D, D),
        checkpoint_offsets=arguments["cu_seqlens"][:-1] * 0,
    )
    return out * 2, wide + 1, returned.amax(), before


def from_slots_to_slots(pool, wide, **arguments):
    """The state of the first call, in two slots, is the initial one of the second."""
    out, returned = kda_jit.prefill(**arguments, initial_state=pool[:2], final_state=pool[2:4])
    wide[:, :22, 1 : HV + 1] = out
    again, _ = kda_jit.prefill(**arguments, initial_state=pool[2:4])
    return again, returned


def one_state(pool, wide, **arguments):
    out, returned = kda_jit.prefill(**arguments, initial_state=pool, final_state=pool)
    return out, returned


def decode_and_verify(pool, wide, **arguments):
    tokens = {name: arguments[name][:, :2].transpose(0, 1).contiguous() for name in TOKENS}
    gates = {name: arguments[name] for name in ("A_log", "dt_bias")}
    slots = arguments["cu_seqlens"][:2] // 5
    outs = [
        kda_jit.recurrent(**tokens, **gates, state_pool=pool, state_indices=slots) for _ in range(2)
    ]
    kda_jit.recurrent(
        **tokens,
        **gates,
        state_pool=pool,
        state_indices=slots,
        write_state=False,
        out=outs[0],
        has_initial_state=slots > 0,
    )
    outs.append(
        kda_jit.recurrent(
            **tokens, **gates, state_pool=pool, state_indices=slots, has_initial_state=slots == 0
        )
    )
    return torch.cat(outs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "function, slots",
    [(view_of_a_pool, 4), (from_slots_to_slots, 4), (one_state, 2), (decode_and_verify, 4)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_is_written_in_a_graph_is_what_is_written_eagerly(function, slots, backend):
    arguments = inputs(5, 17)
    pools = [states(slots) for _ in range(2)]
    wides = [torch.full((1, 30, 2 * HV, D), 7.0) for _ in range(2)]
    want = function(pools[0], wides[0], **arguments)
    before = {name: x.clone() for name, x in arguments.items()}
    got = torch.compile(function, fullgraph=True, backend=backend)(pools[1], wides[1], **arguments)
    for a, b in zip(got, want, strict=True):
        assert a.equal(b)
    assert not pools[0].equal(states(slots))
    assert pools[1].equal(pools[0])
    assert wides[1].equal(wides[0])
    for name, x in before.items():
        assert arguments[name].equal(x), name


def test_inductor_writes_the_callers_buffers_without_a_copy(monkeypatch):
    seen = []
    make = ops.make_problem
    monkeypatch.setattr(ops, "make_problem", lambda *a, **k: seen.append(k) or make(*a, **k))
    pool, wide = states(4), torch.zeros(1, 30, 2 * HV, D)
    compiled = torch.compile(view_of_a_pool, fullgraph=True, backend="inductor")
    compiled(pool, wide, **inputs(5, 17))
    call = seen[0]
    assert call["initial_state"].data_ptr() == pool.data_ptr()
    assert call["out"].data_ptr() == wide[:, 3:].data_ptr()
    assert call["out"].stride() == wide.stride()
    pool = states(2)
    torch.compile(one_state, fullgraph=True, backend="inductor")(pool, wide, **inputs(5, 17))
    for name in ("initial_state", "final_state"):
        assert seen[1][name].data_ptr() == pool.data_ptr()


def test_what_is_read_and_written_is_one_argument_that_is_declared():
    rest = dict.fromkeys(
        ("lower_bound", "scale", "out", "state_indices", "has_initial_state", "checkpoint_state",
         "checkpoint_offsets", "workspace")
    ) | {"backend": "auto"}  # fmt: skip
    state, pool = states(2), states(4)
    with Seen() as seen:
        ops.prefill(**inputs(5, 17), **(rest | {"initial_state": state, "final_state": state}))
        pooled = {"initial_state": pool, "final_state": pool, "state_indices": index(3, 1)}
        ops.prefill(**inputs(5, 17), **(rest | pooled))
    assert seen.names == ["kda_jit.prefill.inplace"] * 2
    for keywords, written in zip(seen.keywords, (state, pool), strict=True):
        assert keywords["state"] is written
        assert not {"initial_state", "final_state"} & {
            n for n, x in keywords.items() if x is not None
        }


def test_returned_buffers_are_the_callers():
    compiled = torch.compile(lambda **k: kda_jit.prefill(**k), fullgraph=True, backend="aot_eager")
    pool, out = states(4), nothing(1, 22, HV, D)
    got = compiled(**inputs(5, 17), out=out, initial_state=pool, state_indices=index(1, 2))
    assert got[0] is out and got[1] is pool
    final = nothing(2, HV, D, D)
    assert compiled(**inputs(5, 17), final_state=final)[1] is final


def test_column_slices_reach_the_operator_with_their_strides(monkeypatch):
    seen = []
    make = ops.make_problem
    monkeypatch.setattr(ops, "make_problem", lambda *a, **k: seen.append(a) or make(*a, **k))

    def project(wide, **rest):
        q, k, v = wide.split([H * D, H * D, HV * D], -1)
        q, k = q.unflatten(-1, (H, D)), k.unflatten(-1, (H, D))
        return kda_jit.prefill(q, k, v.unflatten(-1, (HV, D)), **rest)

    rest = inputs(5, 17)
    wide = torch.cat([rest.pop(name).flatten(2) for name in ("q", "k", "v")], -1)
    got = torch.compile(project, fullgraph=True, backend="inductor")(wide, **rest)
    assert [x.stride(1) for x in seen[0][:3]] == [wide.shape[-1]] * 3
    assert seen[0][0].data_ptr() == wide.data_ptr()
    want = project(wide, **rest)
    assert got[0].equal(want[0]) and got[1].equal(want[1])


def test_lengths_that_only_the_run_knows():
    def chosen(mask, **arguments):
        kept = mask.nonzero().squeeze(1)
        for name in TOKENS:
            arguments[name] = arguments[name][:, kept]
        return kda_jit.prefill(**arguments)

    mask = torch.arange(40) % 3 != 0
    arguments = inputs(40) | {"cu_seqlens": index(0, 11, int(mask.sum()))}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(chosen, fullgraph=True, backend="aot_eager")(mask, **arguments)
    want = chosen(mask, **arguments)
    assert got[0].equal(want[0]) and got[1].equal(want[1])


def test_parameters_are_welcome_where_nobody_asks_for_gradients():
    arguments = inputs(5, 17)
    want = kda_jit.prefill(**arguments)
    arguments["A_log"] = torch.nn.Parameter(arguments["A_log"])

    def without_grad(**k):
        with torch.no_grad():
            return kda_jit.prefill(**k)

    got = torch.compile(without_grad, fullgraph=True, backend="aot_eager")(**arguments)
    assert got[0].equal(want[0])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = torch.compile(prefill, fullgraph=True, backend="aot_eager")(**arguments)
        assert got[1].equal(want[1])


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"beta": torch.randn(1, 21, HV)}, InputError, r"beta: .*slice beta\[:, :22\]"),
        ({"g": torch.randn(1, 22, HV, D).double()}, InputTypeError, "g: expected torch.float32"),
        ({"backend": "cuda"}, NoBackendError, "'cuda'.*CUDA device, got cpu"),
        ({"lower_bound": -6.0}, InputError, "lower_bound"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_a_wrong_argument_is_the_same_error_in_compiled_code(changes, error, words):
    compiled = torch.compile(prefill, fullgraph=True, backend="aot_eager")
    with pytest.raises(error, match=words):
        compiled(**(inputs(5, 17) | changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"workspace": kda_jit.Workspace()}, "workspace: expected None in code that is compiled"),
        ({"v": torch.randn(1, 22, HV)}, r"v: expected \[B, T, HV, V\]"),
        ({"A_log": torch.zeros(HV, requires_grad=True)}, "A_log: expected requires_grad=False"),
        (
            {"initial_state": states(3), "state_indices": index(0, 1), "final_state": states(3)},
            "final_state: expected None or the very pool",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_what_cannot_be_traced_says_so(changes, words):
    compiled = torch.compile(prefill, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=words):
        compiled(**(inputs(5, 17) | changes))


def test_gradients_are_refused_by_the_operators_too():
    arguments = inputs(5, 17, A_log=torch.zeros(HV, requires_grad=True))
    with pytest.raises(GradError, match="A_log: expected requires_grad=False"):
        torch.ops.kda_jit.prefill(**arguments)
    del arguments["cu_seqlens"]
    with pytest.raises(GradError, match="A_log: expected requires_grad=False"):
        torch.ops.kda_jit.recurrent(**arguments, state_pool=states(1), state_indices=index(0))


def test_a_second_view_of_states_in_place_is_the_same_states():
    """Functionalisation gives the operator two tensors; they are one memory or two, never a mix."""

    def twice(state, **arguments):
        return kda_jit.prefill(**arguments, initial_state=state[:], final_state=state[:])[0]

    pools = [states(2) for _ in range(2)]
    want = twice(pools[0], **inputs(5, 17))
    for backend in ("aot_eager", "inductor"):
        pools[1].copy_(states(2))
        got = torch.compile(twice, fullgraph=True, backend=backend)(pools[1], **inputs(5, 17))
        assert got.equal(want) and pools[1].equal(pools[0])


# -- fake and exported ---------------------------------------------------------------------------


def test_fake_tensors_get_the_shapes_and_dtypes_of_a_run():
    real = inputs(5, 17, dtype=torch.bfloat16)
    out, state = kda_jit.prefill(**real)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in real.items()}
        fake_out, fake_state = kda_jit.prefill(**fake)
    for a, b in ((fake_out, out), (fake_state, state)):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


class Layer(torch.nn.Module):
    def __init__(self, slots):
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.full((HV,), 0.1))
        self.dt_bias = torch.nn.Parameter(torch.full((HV, D), 0.2))
        self.register_buffer("pool", states(slots))

    def forward(self, q, k, v, g, beta, cu_seqlens, state_indices):
        gates = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        alone, _ = kda_jit.prefill(q, k, v, g, beta, **gates, cu_seqlens=cu_seqlens)
        pooled, _ = kda_jit.prefill(
            q, k, v, g, beta, **gates, cu_seqlens=cu_seqlens,
            initial_state=self.pool, state_indices=state_indices,
        )  # fmt: skip
        return alone + pooled


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_survives_a_file_and_runs_other_lengths(strict):
    def call(*lengths):
        x = inputs(*lengths)
        slots = torch.arange(len(lengths), dtype=torch.int32)
        return (*(x[name] for name in TOKENS), x["cu_seqlens"], slots)

    T, count = torch.export.Dim("T", min=2, max=4096), torch.export.Dim("count", min=2, max=64)
    shapes = (*({1: T} for _ in TOKENS), {0: count + 1}, {0: count})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, on loading
        program = torch.export.export(
            Layer(8), call(5, 17), dynamic_shapes=shapes, strict=strict
        ).run_decompositions()
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        eager = Layer(8)
        for lengths in ((3, 1, 40), (16, 5)):
            assert loaded(*call(*lengths)).equal(eager(*call(*lengths)))
            assert loaded.pool.equal(eager.pool)
    held = [x for node in program.graph.nodes for x in (node.target, *node.args)]
    assert torch.ops.kda_jit.prefill.default in held
    assert torch.ops.kda_jit.prefill.inplace in held


def test_code_of_the_page_runs(capsys):
    page = Path(__file__).resolve().parent.parent / "docs" / "integrations" / "torch.md"
    line, example = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    scope = {}
    exec(compile(example, page.name, "exec"), scope)
    named, backend = capsys.readouterr().out.splitlines()
    assert named == "['kda_jit.prefill.default']"
    assert backend in ("cuda", "triton", "torch")
    scope["model"] = scope["layer"].requires_grad_(False)
    exec(line, scope)
    got = scope["compiled"](*scope["arguments"])
    assert got.equal(scope["layer"](*scope["arguments"]))
    overloads = re.findall(r"^\| `kda_jit::([\w.]+)` \|", page.read_text(), re.M)
    assert overloads == [schema.partition("(")[0] for schema in ops.SCHEMAS]
