"""A Case is a few numbers that stand for a whole set of input tensors, the same on every device.

A failing test prints its case; pasted into a notebook, the print is the reproduction:

    Case(seed=17, lengths=(65, 0, 128), heads=3, regime='repeated').tensors("cuda")
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from kda_jit.reference import RecurrentResult, recurrent_kda

_judge: ContextVar[torch.device | None] = ContextVar("device of references", default=None)


@contextmanager
def judged_on(device: torch.device) -> Iterator[None]:
    """Within, references are computed there, and brought to where the inputs are.

    A loop over tokens is no faster on a GPU while states are small, and where several processes
    share one, it waits for the others at each of its many launches.
    """
    before = _judge.set(device)
    try:
        yield
    finally:
        _judge.reset(before)


@dataclass(frozen=True, repr=False)
class Case:
    """Everything that decides the tensors, save the device, the dtype and the head size.

    seed         of every random number
    lengths      tokens of each sequence; zeros are legal
    heads        H, of q and k
    value_heads  HV, a multiple of H; None: H
    regime       a key of REGIMES: what the numbers look like
    state_dtype  of the initial state, "float32" or "bfloat16"
    initial      whether there is an initial state
    packed       True: one row and cu_seqlens; False: a dense batch, all lengths equal
    padding      rows after the last token, filled with NaN (packed only)
    scale        None: K ** -0.5
    """

    seed: int = 0
    lengths: tuple[int, ...] = (64,)
    heads: int = 1
    value_heads: int | None = None
    regime: str = "random"
    state_dtype: str = "float32"
    initial: bool = True
    packed: bool = True
    padding: int = 0
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.regime not in REGIMES:
            raise ValueError(f"regime: expected one of {', '.join(REGIMES)}, got {self.regime!r}.")
        if not self.packed and (len(set(self.lengths)) > 1 or self.padding):
            raise ValueError("lengths: a dense batch has sequences of one length and no padding.")

    def replace(self, **changes: Any) -> Case:
        """A copy that differs in these fields."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        """Only what differs from the defaults, but always seed, lengths and heads."""
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name in ("seed", "lengths", "heads") or getattr(self, f.name) != f.default
        ]
        return f"Case({', '.join(shown)})"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that prints as `text`; raises ValueError for anything else."""
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "Case"):
                raise ValueError(text)
            if call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError(text)
            given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            return cls(**given)
        except (SyntaxError, TypeError, ValueError) as error:
            raise ValueError(
                f"case: expected one as it is printed, such as {cls()}, got {text!r} ({error})."
            ) from None

    @property
    def HV(self) -> int:
        return self.heads if self.value_heads is None else self.value_heads

    def tensors(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        head_dim: int = 128,
        value_dim: int | None = None,
    ) -> Inputs:
        """The inputs: drawn on the CPU in float32, rounded to `dtype`, then moved to `device`."""
        tokens, N = sum(self.lengths), len(self.lengths)
        rng = _Rng(self.seed)
        H, HV, K = self.heads, self.HV, head_dim
        V = head_dim if value_dim is None else value_dim
        draft = _Draft(
            q=rng.normal(tokens, H, K),
            k=rng.normal(tokens, H, K),
            v=rng.normal(tokens, HV, V),
            g=rng.normal(tokens, HV, K),
            beta=rng.normal(tokens, HV),
            A_log=torch.zeros(HV),
            dt_bias=torch.zeros(HV, K),
            state=0.1 * rng.normal(N, HV, V, K),
        )
        REGIMES[self.regime].build(draft, rng)

        def finish(x: Tensor) -> Tensor:
            limit = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
            x = x.clamp(-limit, limit).to(dtype)
            if self.packed:
                padding = x.new_full((self.padding, *x.shape[1:]), torch.nan)
                return torch.cat([x, padding]).unsqueeze(0).to(device)
            return x.reshape(N, self.lengths[0] if N else 0, *x.shape[1:]).to(device)

        ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        state_dtype: torch.dtype = getattr(torch, self.state_dtype)
        return Inputs(
            q=finish(draft.q),
            k=finish(draft.k),
            v=finish(draft.v),
            g=finish(draft.g),
            beta=finish(draft.beta),
            A_log=draft.A_log.to(device),
            dt_bias=draft.dt_bias.to(device),
            lower_bound=draft.lower_bound,
            scale=self.scale,
            initial_state=draft.state.to(state_dtype).to(device) if self.initial else None,
            cu_seqlens=ends.to(device) if self.packed else None,
            case=self,
        )


@dataclass(frozen=True)
class Inputs:
    """The arguments of a prefill: `kda_jit.prefill(*x.args, **x.kwargs)`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    scale: float | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    case: Case | None = field(default=None, compare=False)

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def kwargs(self) -> dict[str, Any]:
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "scale": self.scale,
            "initial_state": self.initial_state,
            "cu_seqlens": self.cu_seqlens,
        }

    @property
    def bounds(self) -> list[int]:
        """First token of each sequence, and the end of the last, as in cu_seqlens."""
        if self.cu_seqlens is None:
            return [n * self.q.shape[1] for n in range(self.q.shape[0] + 1)]
        return [int(end) for end in self.cu_seqlens.tolist()]

    @property
    def N(self) -> int:
        return len(self.bounds) - 1

    def reference(self, dtype: torch.dtype = torch.float64) -> RecurrentResult:
        """The recurrence over these very inputs."""
        return self.judge(lambda x: recurrent_kda(*x.args, **x.kwargs, dtype=dtype))

    def judge(self, compute: Callable[[Inputs], RecurrentResult]) -> RecurrentResult:
        """`compute` of these inputs, where `judged_on` says."""
        here, there = self.q.device, _judge.get()
        if there is None or there == here:
            return compute(self)
        found = compute(self.to(there))
        saved = found.checkpoint_state
        return RecurrentResult(
            found.out.to(here),
            found.final_state.to(here),
            None if saved is None else saved.to(here),
        )

    def to(self, device: torch.device | str) -> Inputs:
        """The same on another device."""
        tensors = {x.name: getattr(self, x.name) for x in fields(self)}
        return self.replace(
            **{name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)}
        )

    def replace(self, **changes: Any) -> Inputs:
        """A copy with other tensors; what is not named is shared."""
        return replace(self, **changes)

    def pack(self, pieces: list[tuple[int, int, int]]) -> Inputs:
        """One packed batch of pieces (sequence, first, end), counted within the sequence.

        Each piece starts from the initial state of its sequence; `pack([(2, 0, 50)])` is the
        first 50 tokens of sequence 2 alone. Padding is dropped.
        """
        starts = self.bounds
        rows = [t for n, first, end in pieces for t in range(starts[n] + first, starts[n] + end)]
        index = torch.tensor(rows, dtype=torch.long, device=self.q.device)
        ends = torch.tensor([0, *(end - first for _, first, end in pieces)]).cumsum(0)
        q, k, v, g, beta = (x.flatten(0, 1)[index].unsqueeze(0) for x in self.args)
        state = self.initial_state
        return self.replace(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=None if state is None else state[[n for n, _, _ in pieces]],
            cu_seqlens=ends.to(torch.int32).to(self.q.device),
        )

    def sequence(self, n: int) -> Inputs:
        """Sequence n alone."""
        starts = self.bounds
        return self.pack([(n, 0, starts[n + 1] - starts[n])])


class _Rng:
    """Random numbers that do not depend on the device or on torch's global state."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) * (high - low) + low

    def coin(self, probability: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) < probability


@dataclass
class _Draft:
    """Standard normal tensors that a regime overwrites where it differs. Tokens are flat."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV, K]
    beta: Tensor  # [T, HV]
    A_log: Tensor  # [HV], zero
    dt_bias: Tensor  # [HV, K], zero
    state: Tensor  # [N, HV, V, K], 0.1 * normal
    lower_bound: float | None = -5.0


@dataclass(frozen=True)
class Regime:
    """about: one line; build: turns a standard normal draft into this regime."""

    about: str
    build: Callable[[_Draft, _Rng], None]


def _random(d: _Draft, rng: _Rng) -> None:
    d.g -= 2.0
    d.A_log = rng.uniform(0.5, 4.0, *d.A_log.shape).log()
    d.dt_bias = 0.5 * rng.normal(*d.dt_bias.shape)


def _slow(d: _Draft, rng: _Rng) -> None:
    d.g = -10.8 + 0.3 * d.g  # 5 sigmoid(-10.8) = 1e-4


def _mixed(d: _Draft, rng: _Rng) -> None:
    rate = rng.uniform(log(1 / 3000), 0.0, *d.dt_bias.shape).exp()
    d.dt_bias = torch.logit(rate / 5)
    d.g = 0.1 * d.g


def _saturated_open(d: _Draft, rng: _Rng) -> None:
    d.g = torch.full_like(d.g, -200.0)


def _saturated_closed(d: _Draft, rng: _Rng) -> None:
    d.g = torch.full_like(d.g, 200.0)


def _saturated_both(d: _Draft, rng: _Rng) -> None:
    d.g = torch.where(rng.coin(0.2, *d.g.shape), 200.0, -200.0)


def _correlated(d: _Draft, rng: _Rng) -> None:
    d.k = rng.normal(1, *d.k.shape[1:]) + 0.3 * d.k
    d.q = rng.normal(1, *d.q.shape[1:]) + 0.3 * d.q
    d.beta = 2.2 + 0.3 * d.beta  # about 0.9
    d.g = -5.0 + 0.3 * d.g


def _repeated(d: _Draft, rng: _Rng) -> None:
    d.k = rng.normal(1, *d.k.shape[1:]).expand_as(d.k).clone()
    d.q = d.k.clone()
    d.beta = torch.full_like(d.beta, 8.0)
    d.g = torch.full_like(d.g, -12.0)


def _near_keys(d: _Draft, rng: _Rng) -> None:
    for x in (d.q, d.k):
        x *= 0.05
        x += rng.normal(1, *x.shape[1:])
    d.beta = torch.full_like(d.beta, 10.0)
    d.g = -5.5 + 0.3 * d.g  # about -0.02


def _blocks(d: _Draft, rng: _Rng) -> None:
    _repeated(d, rng)
    period = torch.arange(d.v.shape[0]) % 16
    d.v = rng.normal(16, *d.v.shape[1:])[period]


def _tiny(d: _Draft, rng: _Rng) -> None:
    d.q *= 1e-4
    d.k *= 1e-4


def _zero(d: _Draft, rng: _Rng) -> None:
    _slow(d, rng)  # or the state, to which nothing is added, would vanish below fp32
    d.q = torch.zeros_like(d.q)
    d.k = torch.zeros_like(d.k)


def _zero_rows(d: _Draft, rng: _Rng) -> None:
    for x in (d.q, d.k, d.v):
        x[rng.coin(0.25, *x.shape[:2])] = 0.0
    d.q[:1] = 0.0
    d.k[:1] = 0.0


def _huge(d: _Draft, rng: _Rng) -> None:
    d.q *= 1e4
    d.k *= 1e4
    d.v *= 1e3
    d.g *= 1e3
    d.beta *= 1e3


def _large_state(d: _Draft, rng: _Rng) -> None:
    d.state *= 1e6  # elements of about 1e5
    d.g -= 4.0


def _uneven(d: _Draft, rng: _Rng) -> None:
    _random(d, rng)
    d.v *= 10.0 ** rng.uniform(-3.0, 3.0, 1, d.v.shape[1], 1)
    d.state *= 10.0 ** rng.uniform(-3.0, 3.0, *d.state.shape[:2], 1, 1)


def _shallow(d: _Draft, rng: _Rng) -> None:
    _random(d, rng)
    d.lower_bound = -0.75


def _unbounded(d: _Draft, rng: _Rng) -> None:
    d.lower_bound = None
    d.A_log = rng.uniform(log(1e-3), log(16.0), *d.A_log.shape)
    d.dt_bias = rng.uniform(-6.0, -2.0, *d.dt_bias.shape)


def _unbounded_real(d: _Draft, rng: _Rng) -> None:
    d.lower_bound = None
    d.A_log = rng.uniform(log(1.0), log(200.0), *d.A_log.shape)
    d.A_log[-1] = log(200.0)
    d.g = torch.where(rng.coin(0.3, *d.g.shape), 10.0, -10.0) + d.g


def _table_mixed_rates(d: _Draft, rng: _Rng) -> None:
    d.A_log = rng.uniform(1.0, 16.0, *d.A_log.shape).log()


def _table_plain(d: _Draft, rng: _Rng) -> None:
    pass


def _constant_gate(value: float) -> Callable[[_Draft, _Rng], None]:
    def build(d: _Draft, rng: _Rng) -> None:
        d.g = torch.full_like(d.g, value)

    return build


def _table_wide_gate(d: _Draft, rng: _Rng) -> None:
    d.g *= 8.0


def _table_bias(d: _Draft, rng: _Rng) -> None:
    d.dt_bias = torch.where(rng.coin(0.5, *d.dt_bias.shape), 8.0, -8.0)


def _table_keep(d: _Draft, rng: _Rng) -> None:
    d.g = torch.full_like(d.g, -20.0)
    d.beta = torch.full_like(d.beta, 8.0)


def _table_keep_near_keys(d: _Draft, rng: _Rng) -> None:
    _table_keep(d, rng)
    d.k = rng.normal(1, *d.k.shape[1:]) + 0.02 * d.k


#: The rows of the accuracy table (relative RMS errors at T = 4096, H = 8) and their titles there.
#: q, k, v and beta logits are N(0, 1), A_log and dt_bias 0, unless the row says otherwise.
TABLE_ROWS: dict[str, str] = {
    "table_1_mixed_rates": "g ~ N(0,1), A = log U(1,16)",
    "table_2_plain": "g ~ N(0,1), A_log 0",
    "table_3_g_minus_8": "g = -8",
    "table_4_g_minus_4": "g = -4",
    "table_5_g_plus_8": "g = 8",
    "table_6_wide_gate": "g ~ N(0,8)",
    "table_7_bias": "dt_bias in {-8, 8}",
    "table_8_keep": "g = -20, beta = +8 (nothing forgotten)",
    "table_9_keep_near_keys": "the same with nearly equal keys (k0 + 0.02 N(0,1))",
}

_TABLE_BUILDERS = (
    _table_mixed_rates,
    _table_plain,
    _constant_gate(-8.0),
    _constant_gate(-4.0),
    _constant_gate(8.0),
    _table_wide_gate,
    _table_bias,
    _table_keep,
    _table_keep_near_keys,
)

REGIMES: dict[str, Regime] = {
    "random": Regime("ordinary inputs, memories of 1 to 100 tokens", _random),
    "slow": Regime("decay of 0.9999 per token", _slow),
    "mixed": Regime("memories of 1 to 3000 tokens side by side, log-uniform", _mixed),
    "saturated_open": Regime("gate fully open: nothing is forgotten", _saturated_open),
    "saturated_closed": Regime(
        "gate fully closed: lower_bound in every channel", _saturated_closed
    ),
    "saturated_both": Regime("each gate fully open or fully closed", _saturated_both),
    "correlated": Regime("keys near one direction, beta 0.9, slow decay", _correlated),
    "repeated": Regime("one key (and query) for all tokens, beta near 1, no decay", _repeated),
    "near_keys": Regime("keys 0.05 from one direction, beta 1, decay of 0.98", _near_keys),
    "blocks": Regime("one key for all tokens, the same 16 values over and over", _blocks),
    "tiny": Regime("q and k of 1e-4, where the epsilon of l2norm matters", _tiny),
    "zero_rows": Regime("a quarter of the rows of q, k, v exactly zero", _zero_rows),
    "zero": Regime("q and k exactly zero, slow decay: nothing is learnt", _zero),
    "huge": Regime("q, k of 1e4, v, gate and beta logits of 1e3", _huge),
    "large_state": Regime("initial state of 1e5", _large_state),
    "uneven": Regime("values and states of 1e-3 to 1e3 from head to head", _uneven),
    "shallow": Regime("a bounded gate whose bound is -0.75 and not -5", _shallow),
    "unbounded": Regime("softplus gate, memories of 1 to 1000s of tokens", _unbounded),
    "unbounded_real": Regime("softplus gate with exp(A_log) up to 200", _unbounded_real),
} | {
    name: Regime(TABLE_ROWS[name], build)
    for name, build in zip(TABLE_ROWS, _TABLE_BUILDERS, strict=True)
}

#: Around the edges of every chunk size in use (16, 32, 64), and off them.
EDGE_LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 130)
#: Regimes of the softplus gate, and all others but the rows of the table (for long sequences).
UNBOUNDED = ("unbounded", "unbounded_real")
BOUNDED = tuple(name for name in REGIMES if name not in UNBOUNDED and name not in TABLE_ROWS)
