"""What a legal call is. Each illegal one gets its error, in words, and writes to no buffer."""

import re

import pytest
import torch

from kda_jit.contract import make_problem
from kda_jit.errors import DeviceError, GradError, InputError, InputTypeError

B, T, H, HV, K, V, SLOTS = 2, 5, 2, 4, 16, 24, 7
BF16 = torch.bfloat16
SENTINEL = 7.0


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


def full(*shape, dtype=torch.float32):
    return torch.full(shape, SENTINEL, dtype=dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def dense(**changes):
    """The arguments of a legal dense call, every buffer given."""
    return {
        "q": randn(B, T, H, K),
        "k": randn(B, T, H, K),
        "v": randn(B, T, HV, V),
        "g": randn(B, T, HV, K),
        "beta": randn(B, T, HV),
        "A_log": torch.zeros(HV),
        "dt_bias": torch.zeros(HV, K),
        "out": full(B, T, HV, V, dtype=BF16),
        "final_state": full(B, HV, V, K),
    } | changes


def packed(*lengths, T=64, **changes):
    """The same for sequences packed into one row of T tokens, with checkpoints."""
    ends = [0]
    for length in lengths or (40, 0, 16):
        ends.append(ends[-1] + length)
    N = len(ends) - 1
    return {
        "q": randn(1, T, H, K),
        "k": randn(1, T, H, K),
        "v": randn(1, T, HV, V),
        "g": randn(1, T, HV, K),
        "beta": randn(1, T, HV),
        "A_log": torch.zeros(HV),
        "dt_bias": torch.zeros(HV * K),
        "cu_seqlens": ints(*ends),
        "out": full(1, T, HV, V, dtype=BF16),
        "final_state": full(N, HV, V, K),
        "checkpoint_state": full(N, HV, V, K),
        "checkpoint_offsets": torch.zeros(N, dtype=torch.int32),
    } | changes


def pool(**changes):
    """The same, in place on a pool of states."""
    arguments = packed() | {
        "initial_state": full(SLOTS, HV, V, K),
        "state_indices": ints(3, -1, 0),
        "has_initial_state": torch.tensor([True, False, False]),
        "final_state": None,
    }
    return arguments | changes


# -- legal calls ---------------------------------------------------------------------------------


def test_defaults_are_filled_in():
    p = make_problem(**dense(out=None, final_state=None))
    assert (p.B, p.T, p.H, p.HV, p.K, p.V, p.N) == (B, T, H, HV, K, V, B)
    assert p.scale == K**-0.5
    assert p.lower_bound == -5.0
    assert p.out.shape == (B, T, HV, V)
    assert p.out.dtype is BF16
    assert p.final_state.shape == (B, HV, V, K)
    assert p.final_state.dtype is torch.float32
    assert p.dt_bias.shape == (HV * K,)
    assert not p.is_pool
    assert not p.is_varlen
    assert not p.is_empty


def test_buffers_of_the_caller_are_used_as_they_are():
    arguments = packed()
    p = make_problem(**arguments)
    assert p.out is arguments["out"]
    assert p.final_state is arguments["final_state"]
    assert p.N == 3
    p = make_problem(**pool())
    assert p.is_pool
    assert p.final_state is p.initial_state


def test_two_calls_share_no_output():
    arguments = dense(out=None, final_state=None)
    first, second = make_problem(**arguments), make_problem(**arguments)
    assert first.out.data_ptr() != second.out.data_ptr()
    assert first.final_state.data_ptr() != second.final_state.data_ptr()


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.0},
        {"scale": -1},
        {"lower_bound": None},
        {"lower_bound": -1},
        {"lower_bound": -5.0},
        {"A_log": torch.zeros(1, 1, HV, 1)},
        {"dt_bias": torch.zeros(HV * K)},
        {"dt_bias": torch.zeros(K, HV).t()},
        {"g": randn(B, T, HV, K, dtype=torch.float32)},
        {"beta": randn(B, T, HV, dtype=torch.float32)},
        {"final_state": full(B, HV, V, K, dtype=BF16)},
        {"final_state": None},
        {"out": None},
        {"initial_state": full(B, HV, V, K, dtype=BF16)},
        {"initial_state": full(1, HV, V, K).expand(B, HV, V, K)},
        {"initial_state": full(B, HV, V, K), "has_initial_state": torch.tensor([True, False])},
        {"q": torch.zeros(1, T, H, K, dtype=BF16).expand(B, T, H, K)},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_legal_options(changes):
    make_problem(**dense(**changes))


def test_parameters_become_dense_and_aligned_whatever_their_strides():
    A_log, dt_bias = torch.randn(HV), torch.randn(HV, K)
    flat = torch.full((HV * K + 1,), torch.nan)
    flat[1:] = dt_bias.flatten()
    for changes in (
        {"A_log": torch.stack([A_log, A_log * torch.nan], 1)[:, 0]},
        {"dt_bias": torch.cat([dt_bias, dt_bias * torch.nan], 1)[:, :K]},
        {"dt_bias": torch.stack([dt_bias.flatten(), flat[1:] * torch.nan], 1)[:, 0]},
        {"dt_bias": flat[1:]},
    ):
        p = make_problem(**dense(A_log=A_log, dt_bias=dt_bias) | changes)
        for given, x in ((A_log, p.A_log), (dt_bias.flatten(), p.dt_bias)):
            assert x.is_contiguous()
            assert torch.equal(x, given)
        assert p.dt_bias.data_ptr() % 16 == 0
        assert p.addresses[6:8] == (p.A_log.data_ptr(), p.dt_bias.data_ptr())


def test_tokens_too_far_apart_for_32_bits_are_named():
    def two_tokens(distance):
        memory = torch.empty(distance + H * K, dtype=BF16)  # never touched, so hardly there
        q = memory.as_strided((1, 2, H, K), (distance + H * K, distance, K, 1))
        return make_problem(**packed(2, T=2, checkpoint_state=None, checkpoint_offsets=None, q=q))

    assert two_tokens(1 << 30).layout.far_tokens == ("q",)
    assert two_tokens((1 << 30) - 8).layout.far_tokens == ()


def test_scale_zero_is_zero_and_integers_become_floats():
    assert make_problem(**dense(scale=0.0)).scale == 0.0
    p = make_problem(**dense(scale=2, lower_bound=-1))
    assert (p.scale, p.lower_bound) == (2.0, -1.0)
    assert isinstance(p.scale, float)
    assert isinstance(p.lower_bound, float)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_inputs(dtype):
    names = ("q", "k", "v", "g", "beta")
    p = make_problem(**dense(out=None, **{n: dense()[n].to(dtype) for n in names}))
    assert p.out.dtype is dtype


def test_columns_of_one_projection_are_read_in_place():
    wide = randn(B, T, (2 * H + HV) * K + HV * V + HV + 8)
    arguments, at = dense(), 0
    for name in ("q", "k", "v", "g", "beta"):
        shape = arguments[name].shape
        width = shape[2:].numel()
        arguments[name] = wide[..., at : at + width].unflatten(-1, shape[2:])
        at += width
    p = make_problem(**arguments)
    assert p.q.data_ptr() == wide.data_ptr()
    assert not p.v.is_contiguous()


def test_out_may_be_other_columns_of_the_matrix_that_holds_an_input():
    wide = randn(1, T, 2, HV, V)
    arguments = dense(**{k: x[:1] for k, x in dense().items() if x.dim() > 2})
    make_problem(**(arguments | {"v": wide[:, :, 0], "out": wide[:, :, 1]}))
    shifted = wide.view(1, T, -1)[..., 1 : 1 + HV * V].unflatten(-1, (HV, V))
    with pytest.raises(InputError, match=r"^out: .* v"):
        make_problem(**(arguments | {"v": wide[:, :, 0], "out": shifted}))


def test_strides_of_single_elements_do_not_matter():
    odd = randn(1, T, 1, K).as_strided((1, T, 1, K), (3, K, 5, 1))
    make_problem(
        odd, odd, odd, odd, randn(1, T, 1), A_log=torch.zeros(1), dt_bias=torch.zeros(1, K)
    )


def test_final_state_may_be_initial_state():
    state = full(B, HV, V, K)
    p = make_problem(**dense(initial_state=state, final_state=state))
    assert p.final_state is p.initial_state
    make_problem(**dense(initial_state=state, final_state=state.view_as(state)))
    make_problem(**pool(state_indices=ints(-1, 2, -1)))  # padding may come twice
    arguments = pool()
    make_problem(**(arguments | {"final_state": arguments["initial_state"].view(SLOTS, HV, V, K)}))


def test_slots_of_a_pool_may_lie_apart_and_indices_may_be_a_column():
    states = full(SLOTS, HV * V * K + 32)[:, : HV * V * K].unflatten(1, (HV, V, K))
    table = torch.tensor([[3, 9], [-1, 9], [0, 9]])
    p = make_problem(**pool(initial_state=states, state_indices=table[:, 0]))
    assert p.state_indices.stride(0) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        packed(0, 0, T=0),
        packed(
            cu_seqlens=ints(0),
            final_state=full(0, HV, V, K),
            checkpoint_state=None,
            checkpoint_offsets=None,
        ),
        {k: x[:0] if x.dim() > 2 else x for k, x in dense().items()},
    ],
    ids=["no tokens", "no sequences", "no batch"],
)
def test_empty_calls_are_legal(arguments):
    p = make_problem(**arguments)
    assert p.is_empty
    assert p.final_state.shape[0] == p.N


def test_padding_after_the_last_sequence_is_legal():
    assert make_problem(**packed(3, 4, T=64)).N == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes(dtype):
    arguments = pool()
    for name in ("cu_seqlens", "state_indices", "checkpoint_offsets"):
        arguments[name] = arguments[name].to(dtype)
    make_problem(**arguments)


def test_grad_is_refused_only_where_it_is_recorded():
    arguments = dense()
    arguments["q"].requires_grad_()
    with torch.no_grad():
        make_problem(**arguments)
    with torch.inference_mode():
        make_problem(**arguments)
    with pytest.raises(GradError, match=r"^q: .*no_grad"):
        make_problem(**arguments)


def test_misaligned_tensors_are_named_and_not_refused():
    def off(x, by):
        spare = x.new_zeros(x.numel() + 16)
        return spare[by : by + x.numel()].view(x.shape)

    p = make_problem(**dense())
    assert p.misaligned == ()
    p = make_problem(**dense(k=off(randn(B, T, H, K), 4), final_state=off(full(B, HV, V, K), 1)))
    assert p.misaligned == ("k", "final_state")
    rows = randn(B, T, HV * V + 4)[..., : HV * V].unflatten(-1, (HV, V))
    assert make_problem(**dense(v=rows)).misaligned == ("v",)
    # A stride that is never followed does not count.
    single = randn(1, T, HV * K).as_strided((1, T, HV, K), (3, HV * K, K, 1))
    assert make_problem(**{k: x[:1] if x.dim() > 2 else x for k, x in dense(g=single).items()}
                        ).misaligned == ()  # fmt: skip


def test_aligned_rows_stay_aligned_at_any_batch_stride():
    wide = randn(B, T, HV * K + 8)[..., : HV * K].unflatten(-1, (HV, K))
    assert make_problem(**dense(g=wide)).misaligned == ()


def test_an_expanded_state_may_not_hold_the_final_ones():
    one = full(1, HV, V, K)
    final = full(B, HV, V, K)
    final_and_more = dense(initial_state=final[:1].expand(B, HV, V, K), final_state=final)
    with pytest.raises(InputError, match=r"^final_state: .*overlap"):
        make_problem(**final_and_more)
    make_problem(**(final_and_more | {"initial_state": one.expand(B, HV, V, K)}))


# -- illegal calls -------------------------------------------------------------------------------


def meta(name, base=packed):
    return lambda: base() | {name: base()[name].to("meta")}


def changed(base=dense, **changes):
    return lambda: base(**changes)


NAN, INF = float("nan"), float("inf")
ILLEGAL = {
    # name: (arguments, error, what the message must hold)
    "q not a tensor": (changed(q=[1.0]), InputTypeError, r"^q: .*torch.Tensor.*list"),
    "q numpy": (changed(q=randn(B, T, H, K).float().numpy()), InputTypeError, r"^q: .*ndarray"),
    "q rank": (changed(q=randn(T, H, K)), InputError, r"^q: .*\[B, T, H, K\].*\[5, 2, 16\]"),
    "v rank": (changed(v=randn(B, T, HV)), InputError, r"^v: .*\[B, T, HV, V\].*\[2, 5, 4\]"),
    "k shape": (changed(k=randn(B, T, H, 8)), InputError, r"^k: .*\[2, 5, 2, 16\].*\[2, 5, 2, 8\]"),
    "v tokens": (changed(v=randn(B, T + 1, HV, V)), InputError, r"^v: .*5.*slice v\[:, :5\]"),
    "g more tokens": (changed(g=randn(B, T + 48, HV, K)), InputError, r"^g: .*slice g\[:, :5\]"),
    "g of key heads": (changed(g=randn(B, T, H, K)), InputError, r"^g: .*heads of v"),
    "g per head": (changed(g=randn(B, T, HV)), InputError, r"^g: .*expand it over K"),
    "g half K": (changed(g=randn(B, T, HV, K // 2)), InputError, r"^g: .*4, 16\].*4, 8\]"),
    "beta rank": (changed(beta=randn(B, T, HV, 1)), InputError, r"^beta: .*\[B, T, HV\]"),
    "beta of key heads": (changed(beta=randn(B, T, H)), InputError, r"^beta: .*\[2, 5, 4\]"),
    "no heads": (changed(q=randn(B, T, 0, K)), InputError, r"^q, v: .*one head"),
    "value heads": (changed(v=randn(B, T, 3, V)), InputError, r"^v: .*multiple of H = 2.*3"),
    "q dtype": (changed(q=torch.zeros(B, T, H, K).int()), InputTypeError, r"^q: .*bfloat16.*int32"),
    "k dtype": (
        changed(k=randn(B, T, H, K, dtype=torch.float16)),
        InputTypeError,
        r"^k: .*bfloat16.*float16",
    ),
    "v dtype": (
        changed(v=randn(B, T, HV, V, dtype=torch.float32)),
        InputTypeError,
        r"^v: .*bfloat16.*float32",
    ),
    "g dtype": (
        changed(g=randn(B, T, HV, K, dtype=torch.float16)),
        InputTypeError,
        r"^g: .*bfloat16 or torch.float32.*float16",
    ),
    "beta dtype": (
        changed(beta=randn(B, T, HV, dtype=torch.float64)),
        InputTypeError,
        r"^beta: .*float64",
    ),
    "out dtype": (changed(out=full(B, T, HV, V)), InputTypeError, r"^out: .*bfloat16.*float32"),
    "out shape": (changed(out=full(B, T, HV, K, dtype=BF16)), InputError, r"^out: .*4, 24\]"),
    "q last stride": (
        changed(q=randn(B, T, K, H).transpose(2, 3)),
        InputError,
        r"^q: .*stride\(3\) = 1.*\(160, 32, 1, 2\)",
    ),
    "v head stride": (
        changed(v=randn(B, T, HV, V + 1)[..., :V]),
        InputError,
        r"^v: .*stride\(2\) = 24",
    ),
    "q heads first": (
        changed(q=randn(B, H, T, K).transpose(1, 2)),
        InputError,
        r"^q: .*stride\(2\) = 16",
    ),
    "beta stride": (
        changed(beta=randn(B, T, HV, 2)[..., 0]),
        InputError,
        r"^beta: .*stride\(2\) = 1",
    ),
    "tokens overlap": (
        changed(k=randn(B, 1, H, K).expand(B, T, H, K)),
        InputError,
        r"^k: .*stride\(1\) >= 32.*overlap",
    ),
    "out batch overlaps": (
        changed(out=full(1, T, HV, V, dtype=BF16).expand(B, T, HV, V)),
        InputError,
        r"^out: .*no element twice",
    ),
    "A_log size": (changed(A_log=torch.zeros(HV + 1)), InputError, r"^A_log: .*\[HV\] = \[4\]"),
    "A_log dtype": (changed(A_log=torch.zeros(HV, dtype=BF16)), InputTypeError, r"^A_log: .*32"),
    "A_log missing": (changed(A_log=None), InputTypeError, r"^A_log: .*None"),
    "dt_bias per head": (changed(dt_bias=torch.zeros(HV)), InputError, r"^dt_bias: .*not one per"),
    "dt_bias shape": (changed(dt_bias=torch.zeros(K, HV)), InputError, r"^dt_bias: .*\[4, 16\]"),
    "dt_bias dtype": (
        changed(dt_bias=torch.zeros(HV, K, dtype=BF16)),
        InputTypeError,
        r"^dt_bias: .*float32.*bfloat16",
    ),
    "lower_bound positive": (changed(lower_bound=0.5), InputError, r"^lower_bound: .*0\).*0.5"),
    "lower_bound zero": (changed(lower_bound=0.0), InputError, r"^lower_bound: .*\[-5, 0\)"),
    "lower_bound low": (changed(lower_bound=-50), InputError, r"^lower_bound: .*-50"),
    "lower_bound nan": (changed(lower_bound=NAN), InputError, r"^lower_bound: .*nan"),
    "lower_bound tensor": (
        changed(lower_bound=torch.tensor(-5.0)),
        InputTypeError,
        r"^lower_bound: .*float or None",
    ),
    "lower_bound bool": (changed(lower_bound=True), InputTypeError, r"^lower_bound: .*bool"),
    "scale nan": (changed(scale=NAN), InputError, r"^scale: .*finite.*nan"),
    "scale inf": (changed(scale=INF), InputError, r"^scale: .*finite.*inf"),
    "scale beyond float32": (changed(scale=1e39), InputError, r"^scale: .*float32.*1e\+39"),
    "scale of 400 digits": (changed(scale=10**400), InputError, r"^scale: .*inf"),
    "lower_bound of 400 digits": (
        changed(lower_bound=-(10**400)), InputError, r"^lower_bound: .*-5"
    ),
    "scale str": (changed(scale="1"), InputTypeError, r"^scale: .*str"),
    "cu_seqlens list": (changed(packed, cu_seqlens=[0]), InputTypeError, r"^cu_seqlens: .*list"),
    "cu_seqlens with B": (
        changed(cu_seqlens=ints(0, 5)),
        InputError,
        r"^cu_seqlens: .*B = 1.*B = 2.*reshape",
    ),
    "cu_seqlens rank": (
        changed(packed, cu_seqlens=ints(0, 40, 40, 56)[None]),
        InputError,
        r"^cu_seqlens: .*\[N \+ 1\].*\[1, 4\]",
    ),
    "cu_seqlens empty": (changed(packed, cu_seqlens=ints()), InputError, r"^cu_seqlens: .*\[0\]"),
    "cu_seqlens dtype": (
        changed(packed, cu_seqlens=torch.tensor([0.0, 40, 40, 56])),
        InputTypeError,
        r"^cu_seqlens: .*int32 or torch.int64.*float32",
    ),
    "cu_seqlens strided": (
        changed(packed, cu_seqlens=ints(0, 9, 40, 9, 40, 9, 56, 9)[::2]),
        InputError,
        r"^cu_seqlens: .*contiguous.*\(2,\)",
    ),
    "cu_seqlens start": (
        changed(packed, cu_seqlens=ints(1, 40, 40, 56)),
        InputError,
        r"^cu_seqlens: .*start with 0, got 1",
    ),
    "cu_seqlens decreasing": (
        changed(packed, cu_seqlens=ints(0, 40, 16, 56)),
        InputError,
        r"^cu_seqlens: .*never decrease, got 40 then 16 at position 2",
    ),
    "cu_seqlens too long": (
        changed(packed, cu_seqlens=ints(0, 40, 40, 65)),
        InputError,
        r"^cu_seqlens: .*T = 64, got 65",
    ),
    "initial_state shape": (
        changed(initial_state=full(B, HV, K, V)),
        InputError,
        r"^initial_state: .*\[2, 4, 24, 16\].*\[2, 4, 16, 24\].*V-major",
    ),
    "initial_state transposed": (
        changed(initial_state=full(B, HV, K, V).transpose(-1, -2)),
        InputError,
        r"^initial_state: .*V-major",
    ),
    "initial_state dtype": (
        changed(initial_state=full(B, HV, V, K, dtype=torch.float16)),
        InputTypeError,
        r"^initial_state: .*float32 or torch.bfloat16.*float16",
    ),
    "pool without indices": (
        changed(pool, state_indices=None, has_initial_state=None),
        InputError,
        r"^initial_state: .*\[N, HV, V, K\].*pass state_indices",
    ),
    "indices without a pool": (
        changed(packed, state_indices=ints(0, 1, 2)),
        InputError,
        r"^state_indices: .*initial_state, the pool.*None",
    ),
    "pool shape": (
        changed(pool, initial_state=full(SLOTS, HV, K, V)),
        InputError,
        r"^initial_state: .*\[slots, 4, 24, 16\]",
    ),
    "pool overlaps itself": (
        changed(pool, initial_state=full(1, HV, V, K).expand(SLOTS, HV, V, K)),
        InputError,
        r"^initial_state: .*stride\(0\) >= 1536",
    ),
    "final_state beside the pool": (
        changed(pool, final_state=full(3, HV, V, K)),
        InputError,
        r"^final_state: .*very pool.*\[3, 4, 24, 16\]",
    ),
    "final_state of another dtype than the pool": (
        changed(pool, final_state=full(SLOTS, HV, V, K, dtype=BF16)),
        InputError,
        r"^final_state: .*very pool",
    ),
    "state_indices size": (changed(pool, state_indices=ints(0, 1)), InputError, r"^state_.*\[3\]"),
    "state_indices dtype": (
        changed(pool, state_indices=ints(0, 1, 2, dtype=torch.int16)),
        InputTypeError,
        r"^state_indices: .*int16",
    ),
    "state_indices expanded": (
        changed(pool, state_indices=ints(1).expand(3)),
        InputError,
        r"^state_indices: .*stride\(0\) >= 1",
    ),
    "state_indices range": (
        changed(pool, state_indices=ints(0, SLOTS, -1)),
        InputError,
        r"^state_indices: .*below 7.*got 7 for sequence 1",
    ),
    "state_indices twice": (
        changed(pool, state_indices=ints(4, 4, -1)),
        InputError,
        r"^state_indices: .*slot 4 for sequences 0 and 1",
    ),
    "has_initial_state alone": (
        changed(has_initial_state=torch.tensor([True, False])),
        InputError,
        r"^has_initial_state: .*initial_state=None",
    ),
    "has_initial_state dtype": (
        changed(pool, has_initial_state=ints(1, 0, 0)),
        InputTypeError,
        r"^has_initial_state: .*torch.bool.*int32",
    ),
    "has_initial_state size": (
        changed(pool, has_initial_state=torch.tensor([True])),
        InputError,
        r"^has_initial_state: .*\[3\].*\[1\]",
    ),
    "has_initial_state strided": (
        changed(pool, has_initial_state=torch.ones(6, dtype=torch.bool)[::2]),
        InputError,
        r"^has_initial_state: .*contiguous",
    ),
    "final_state shape": (changed(final_state=full(1, HV, V, K)), InputError, r"^final_.*2, 4"),
    "final_state dtype": (
        changed(final_state=full(B, HV, V, K, dtype=torch.float64)),
        InputTypeError,
        r"^final_state: .*float64",
    ),
    "final_state overlaps itself": (
        changed(final_state=full(1, HV, V, K).expand(B, HV, V, K)),
        InputError,
        r"^final_state: .*overlap",
    ),
    "checkpoint_state alone": (
        changed(packed, checkpoint_offsets=None),
        InputError,
        r"^checkpoint_state, checkpoint_offsets: .*both or neither.*offsets=None",
    ),
    "checkpoint_offsets alone": (
        changed(packed, checkpoint_state=None),
        InputError,
        r"both or neither.*checkpoint_state=None",
    ),
    "checkpoint granule": (
        changed(packed, checkpoint_offsets=ints(8, 0, 0)),
        InputError,
        r"^checkpoint_offsets: .*multiples of 16.*got 8 for sequence 0 of 40",
    ),
    "checkpoint past the end": (
        changed(packed, checkpoint_offsets=ints(48, 0, 0)),
        InputError,
        r"^checkpoint_offsets: .*got 48 for sequence 0 of 40 tokens",
    ),
    "checkpoint negative": (
        changed(packed, checkpoint_offsets=ints(-16, 0, 0)),
        InputError,
        r"^checkpoint_offsets: .*got -16",
    ),
    "checkpoint_offsets strided": (
        changed(packed, checkpoint_offsets=torch.zeros(6, dtype=torch.int32)[::2]),
        InputError,
        r"^checkpoint_offsets: .*contiguous",
    ),
    "checkpoint_state dtype": (
        changed(packed, checkpoint_state=full(3, HV, V, K, dtype=torch.float16)),
        InputTypeError,
        r"^checkpoint_state: .*float16",
    ),
    "q elsewhere": (meta("q", dense), DeviceError, r"^q: .*CUDA or CPU.*meta"),
    **{
        f"{name} elsewhere": (meta(name), DeviceError, rf"^{name}: .*the CPU.*meta")
        for name in (
            "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "out", "final_state",
            "checkpoint_state", "checkpoint_offsets",
        )
    },
    **{
        f"{name} elsewhere": (meta(name, pool), DeviceError, rf"^{name}: .*the CPU.*meta")
        for name in ("initial_state", "state_indices", "has_initial_state")
    },
}  # fmt: skip
WRITTEN = ("out", "final_state", "initial_state", "checkpoint_state")


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_call(case):
    build, error, message = ILLEGAL[case]
    arguments = build()
    tensors = {
        k: x.clone() for k, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_cpu
    }
    with pytest.raises(error) as caught:
        make_problem(**arguments)
    assert type(caught.value) is error
    text = str(caught.value)
    assert re.search(message, text), text
    for word in ("expected", "got"):
        assert word in text
    for name, before in tensors.items():
        assert arguments[name].equal(before) or name not in WRITTEN


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_call_stays_illegal_among_legal_ones_of_its_kind(case):
    """What is remembered of calls must neither let one pass nor change what is said."""
    build, error, _ = ILLEGAL[case]
    said = []
    for base in (dense, packed, pool):
        make_problem(**base())
        with pytest.raises(error) as caught:
            make_problem(**build())
        said.append(str(caught.value))
    assert said[0] == said[1] == said[2]


OVERLAPS = [
    *(
        (packed, written, other)
        for written in ("out", "final_state", "checkpoint_state")
        for other in (
            "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens",
            "checkpoint_offsets", "out", "final_state", "checkpoint_state",
        )
        if written != other
    ),
    *((pool, "initial_state", x) for x in ("q", "out", "state_indices", "has_initial_state")),
]  # fmt: skip


@pytest.mark.parametrize("base, written, other", OVERLAPS)
def test_overlap_is_refused(base, written, other):
    """`written` and `other` share but the first element of the one and the last of the other."""
    arguments = base()
    if base is packed:
        arguments["initial_state"] = full(3, HV, V, K)
    x, y = arguments[written], arguments[other]
    memory = torch.zeros(x.nbytes + y.nbytes, dtype=torch.uint8)
    shift = max(y.nbytes - y.element_size(), 0) // 4 * 4
    arguments[written] = memory[shift : shift + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    shared = memory[: y.nbytes].view(y.dtype).view(y.shape)
    before = memory.clone()
    with pytest.raises(InputError) as caught:
        make_problem(**(arguments | {other: shared}))
    text = str(caught.value)
    assert written in text
    assert other in text
    assert "overlap" in text
    assert memory.equal(before)
    arguments[other] = y
    make_problem(**arguments)


def test_partial_overlap_of_final_and_initial_state_says_how_to_update_in_place():
    states = full(B + 1, HV, V, K)
    with pytest.raises(InputError, match=r"^final_state: .*exactly initial_state.*6144 bytes"):
        make_problem(**dense(initial_state=states[:B], final_state=states[1:]))


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="beta_is_raw"):
        make_problem(**dense(), beta_is_raw=True)


def test_the_checks_read_no_contents_on_a_gpu(monkeypatch):
    """On a GPU a read would wait for the device; here the contents check is told apart by name."""
    from kda_jit.contract import problem

    seen = []
    monkeypatch.setattr(problem, "check_contents", lambda *a: seen.append(a))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("read on the host"))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("read on the host"))
    make_problem(**pool())
    assert len(seen) == 1
