"""A small serving engine that plays against a layer, and compares all of it with the recurrence.

    engine = Engine(core, slots=12, seed=0)
    request = engine.add(prompt=40)
    engine.step([Work(request, "prefill", 33)])
    engine.step([Work(request, "decode")], padding=5)

Requests are prefilled in chunks, decoded, verified with drafts of which some are rejected,
preempted, and resumed from checkpoints. After each step every request's outputs and state are held
against the float64 recurrence over the tokens that it has accepted, and nothing else may have
changed: between two slots of the pool lies a guard of NaN, past the last token lie rows of NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from kda_jit.layer import KDACore, StepRecord
from kda_jit.pack import PackInputs
from kda_jit.reference import RecurrentResult, recurrent_kda
from kda_jit.step import StepMetadata

from .cases import Inputs
from .numeric import Limit, Mismatch, assert_close, block_errors, plain_result

#: What engines leave in index buffers past the live entries.
GARBAGE = 1_065_369_473
#: Tokens of a head whose outputs are judged together.
BLOCK = 16


@dataclass(eq=False)
class Request:
    """Tokens that are known, how many of them the state includes, and where that lies.

    slots   of the pool, 1 + num_spec of them; none while preempted
    column  of `slots` that holds the state
    state   [HV, V, K], the float64 recurrence over tokens[:computed]
    """

    tokens: PackInputs
    slots: list[int]
    state: Tensor
    computed: int = 0
    column: int = 0
    checkpoints: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.tokens.q.shape[1]

    @property
    def pending(self) -> int:
        return self.known - self.computed


@dataclass(frozen=True)
class Work:
    """What one request does in a step.

    tokens      prefill: of the pending ones, 0 is legal; speculative: 1 + drafts
    accept      speculative: tokens that are accepted afterwards; 0 keeps the state as it was, as
                after a step whose results an engine throws away
    checkpoint  prefill: save the state after that many tokens
    """

    request: Request
    kind: Literal["prefill", "decode", "speculative"]
    tokens: int = 1
    accept: int = 1
    checkpoint: int = 0


class Engine:
    """Owns the pool, the requests' slots and the gate parameters; see the module.

    slots  that requests share
    limit  relative RMS error that outputs (by 16 tokens of a head) and states (by head) may have
    """

    def __init__(
        self, core: KDACore, *, slots: int, seed: int = 0, limit: float | None = None
    ) -> None:
        self.core = core
        self._generator = torch.Generator().manual_seed(seed)
        self._limit = limit or (1e-4 if core.dtype is torch.float32 else 2e-2)
        HV, V, K = core.num_value_heads, core.value_head_dim, core.head_dim
        shape = (2 * slots + 1, HV, V, K)
        self.pool = torch.full(shape, torch.nan, dtype=core.state_dtype, device=core.device)
        self.free = list(range(1, 2 * slots, 2))  # the even ones are guards
        self.A_log = (0.5 + 2.0 * self._random(HV).sigmoid()).log().to(core.device)
        self.dt_bias = (0.5 * self._random(HV, K)).to(core.device)

    # -- requests --------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return len(self.free) > self.core.limits.num_spec

    def add(self, prompt: int) -> Request:
        """A request whose prompt is that long; its slots hold whatever the last owner left."""
        return Request(self._draw(prompt), self._take_slots(), self._zero_state())

    def preempt(self, request: Request) -> None:
        """Takes the slots away; `readmit` has to compute every token again."""
        self.free.extend(request.slots)
        request.slots, request.computed, request.column = [], 0, 0
        request.state = self._zero_state()

    def readmit(self, request: Request) -> None:
        request.slots = self._take_slots()

    def resume(self, request: Request, checkpoint: int, new_tokens: int) -> Request:
        """Another request with the prefix of that checkpoint and then tokens of its own."""
        computed, saved, state = request.checkpoints[checkpoint]
        tokens = _join([request.tokens.rows(0, computed), self._draw(new_tokens)])
        other = Request(tokens, self._take_slots(), state, computed)
        self.pool[other.slots[0]] = saved
        return other

    def _take_slots(self) -> list[int]:
        return [self.free.pop(0) for _ in range(1 + self.core.limits.num_spec)]

    def _zero_state(self) -> Tensor:
        return torch.zeros(self.pool.shape[1:], dtype=torch.float64, device=self.core.device)

    # -- a step ----------------------------------------------------------------------------------

    def step(
        self,
        work: Sequence[Work],
        *,
        padding: int = 0,
        idle_rows: int = 0,
        idle_sequences: int = 0,
        strided: bool = False,
        index_dtype: torch.dtype = torch.int32,
        lane: int = 0,
    ) -> StepRecord:
        """Runs the work as one step, in the order given where the step is mixed, and checks it.

        padding         rows of the tensors past num_actual_tokens
        idle_rows       rows of the step that belong to no sequence, as in a padded CUDA graph
        idle_sequences  sequences without tokens or slots at the end of each group, likewise
        strided         whether the inputs are column slices of one projection
        """
        core = self.core
        decodes = [w for w in work if w.kind == "decode"]
        prefills = [w for w in work if w.kind == "prefill"]
        spec = [w for w in work if w.kind == "speculative"]
        non_spec = decodes + prefills
        order = list(work) if non_spec and spec else non_spec + spec

        new = [self._new_tokens(w) for w in order]
        lengths = [x.q.shape[1] for x in new]
        starts = dict(zip(order, accumulate(lengths, initial=0)))
        live = sum(lengths)
        rows = live + idle_rows
        x = self._tensors(new, idle_rows + padding, strided)
        out = torch.full_like(x.v, torch.nan, memory_format=torch.contiguous_format)
        saved = self.pool.new_full(
            (len(non_spec) + idle_sequences, *self.pool.shape[1:]), torch.nan
        )

        def index(values: Sequence[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=index_dtype, device=core.device)

        def ends(group: list[Work]) -> Tensor:
            total = list(accumulate((w.tokens for w in group), initial=0))
            return index([*total, *[total[-1]] * idle_sequences, GARBAGE])

        def token_indx(group: list[Work]) -> Tensor:
            found = [t for w in group for t in range(starts[w], starts[w] + w.tokens)]
            return index([*found, GARBAGE, -GARBAGE, 0])

        groups: dict[str, Any] = {}
        if non_spec:
            table = [[w.request.slots[w.request.column], GARBAGE] for w in non_spec]
            started = [w.request.computed > 0 for w in non_spec]
            has = torch.tensor([*started, *[False] * idle_sequences], device=core.device)
            groups |= {
                "num_decodes": len(decodes) + (0 if prefills else idle_sequences),
                "num_prefills": len(prefills) + (idle_sequences if prefills else 0),
                "non_spec_query_start_loc": ends(non_spec),
                "non_spec_state_indices": index(table + [[-1, -1]] * idle_sequences)[:, 0],
                "has_initial_state": None if all(started) else has,
            }
        if any(w.checkpoint for w in work):
            offsets = index([*(w.checkpoint for w in non_spec), *[0] * idle_sequences])
            groups |= {"checkpoint_state": saved, "checkpoint_offsets": offsets}
        if spec:
            columns = 1 + core.limits.num_spec
            table = [[*w.request.slots, GARBAGE] for w in spec]
            table += [[-1] * (columns + 1)] * idle_sequences
            accepted = [w.request.column + 1 if w.accept else 0 for w in spec]
            groups |= {
                "num_spec_decodes": len(spec) + idle_sequences,
                "spec_query_start_loc": ends(spec),
                "spec_state_indices": index(table)[:, :columns],
                "num_accepted_tokens": index([*accepted, *[1] * idle_sequences]),
            }
        if non_spec and spec:
            groups |= {
                "non_spec_token_indx": token_indx(non_spec),
                "spec_token_indx": token_indx(spec),
            }
        before = self.pool.clone()
        given = [y.clone() for y in x]
        record = core.forward(
            *x, self.A_log, self.dt_bias, self.pool, StepMetadata(rows, **groups), out, lane=lane
        )

        for name, y, z in zip(PackInputs._fields, x, given, strict=True):
            assert _same_bits(y, z), f"{name} was modified"
        assert out[:, live:].isnan().all(), "rows that belong to no sequence were written"
        self._check_outputs(order, new, out[:, :live])
        self._check_checkpoints(order, new, saved, non_spec)
        self._advance(order, new, before)
        wanted = "scatter" if non_spec and spec else "direct" if order or idle_sequences else "none"
        assert record.route == (wanted if groups else "none"), record
        return record

    def _new_tokens(self, w: Work) -> PackInputs:
        """The inputs of one request's rows; drafts are drawn now and kept only once accepted."""
        r = w.request
        if w.kind == "speculative":
            assert r.pending == 0
            return self._draw(w.tokens)
        if w.kind == "decode" and r.pending == 0:
            r.tokens = _join([r.tokens, self._draw(1)])
        assert w.tokens <= r.pending
        return r.tokens.rows(r.computed, r.computed + w.tokens)

    def _tensors(self, new: list[PackInputs], spare: int, strided: bool) -> PackInputs:
        """The rows of the step, and `spare` rows of NaN."""
        x = _join([*new, _filled(self._draw(spare), torch.nan)])
        if not strided:
            return x
        # Columns of one projection, between others that hold NaN; 16 bytes apart at least, and rows
        # whole multiples of that, which the CUDA backend asks for.
        flat = [y.flatten(2) for y in x[:4]] + [x.beta]
        gap = x.q.new_full((1, x.q.shape[1], 8), torch.nan)
        end = gap[..., : -x.beta.shape[2] % 8]
        wide = torch.cat([*(z.to(x.q.dtype) for y in flat for z in (gap, y)), end], 2)
        columns, at = [], 0
        for y, z in zip(x, flat):
            at += 8
            columns.append(wide[..., at : at + z.shape[2]].unflatten(2, y.shape[2:]))
            at += z.shape[2]
        return PackInputs(*columns)

    # -- what must hold --------------------------------------------------------------------------

    def _recurrence(
        self, order: list[Work], new: list[PackInputs], offsets: list[int] | None = None
    ) -> RecurrentResult:
        """Of all requests of a step, from their states before it."""
        return recurrent_kda(
            *_join(new),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.core.lower_bound,
            scale=self.core.scale,
            initial_state=torch.stack([w.request.state for w in order]),
            cu_seqlens=_ends(new),
            checkpoint_offsets=None if offsets is None else torch.tensor(offsets),
        )

    def _plain_losses(self, order: list[Work], new: list[PackInputs], want: Tensor) -> Tensor:
        """What each block of a step loses where operands, outputs and the pool are rounded."""
        states = torch.stack([w.request.state for w in order])
        states = states.to(self.core.state_dtype).to(states.dtype)
        inputs = Inputs(
            *_join(new),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.core.lower_bound,
            scale=self.core.scale,
            initial_state=states,
            cu_seqlens=_ends(new),
        )
        return _block_errors(plain_result(inputs, self.core.dtype).out, want, new)

    def _check_outputs(self, order: list[Work], new: list[PackInputs], out: Tensor) -> None:
        if not order:
            return
        ends = _ends(new)
        want = self._recurrence(order, new).out
        for w, begin, end in zip(order, ends, ends[1:]):
            if w.kind == "speculative" and not w.accept:
                assert (out[:, begin:end] == 0).all(), "nothing accepted before: outputs are zero"
                want[:, begin:end] = 0
        try:
            assert_close("out", out, want, self._limit, cu_seqlens=ends, chunk=BLOCK)
        except Mismatch as beyond:
            if self.core.dtype is self.core.state_dtype is torch.float32:
                raise
            # The only token of a sequence may all but cancel; rounding its operands, or the state
            # in the pool, does as much.
            errors, losses = _block_errors(out, want, new), self._plain_losses(order, new, want)
            limits = [Limit(loss, slack=self._limit) for loss in losses.tolist()]
            for error, limit in zip(errors.tolist(), limits, strict=True):
                if error > limit.allowed:
                    words = f"out: relative RMS error {error:.1e} of a block; allowed {limit}"
                    raise Mismatch(words, error, limit.allowed) from beyond

    def _check_checkpoints(
        self, order: list[Work], new: list[PackInputs], saved: Tensor, non_spec: list[Work]
    ) -> None:
        if not any(w.checkpoint for w in order):
            assert saved.isnan().all()
            return
        result = self._recurrence(order, new, [w.checkpoint for w in order])
        assert result.checkpoint_state is not None
        for n, w in enumerate(non_spec):
            if not w.checkpoint:
                assert saved[n].isnan().all(), "a checkpoint that nobody asked for"
                continue
            at = order.index(w)
            want = result.checkpoint_state[at]
            assert_close("checkpoint_state", saved[n : n + 1], want[None], self._limit)
            w.request.checkpoints.append((w.request.computed + w.checkpoint, saved[n], want))
        assert saved[len(non_spec) :].isnan().all()

    def _advance(self, order: list[Work], new: list[PackInputs], before: Tensor) -> None:
        """Accepts tokens, then compares every slot of the pool: new states, and all the others."""
        kept, touched = [], set()
        for w, x in zip(order, new, strict=True):
            count = w.accept if w.kind == "speculative" else w.tokens
            kept.append(x.rows(0, count))
            if w.kind != "speculative":
                touched.add(w.request.slots[w.request.column])
            elif w.accept:
                touched.update(w.request.slots[: w.tokens])
        untouched = [slot for slot in range(self.pool.shape[0]) if slot not in touched]
        assert _same_bits(self.pool[untouched], before[untouched]), "another slot was written"
        if not order:
            return
        states = self._recurrence(order, kept).final_state
        for w, x, state in zip(order, kept, states):
            r = w.request
            r.state = state
            if w.kind == "speculative" and w.accept:
                r.column = w.accept - 1
                r.tokens = _join([r.tokens, x])
            r.computed += x.q.shape[1]
        slots = [w.request.slots[w.request.column] for w in order]
        assert_close("final_state", self.pool[slots], states, self._limit)

    # -- numbers ---------------------------------------------------------------------------------

    def _draw(self, tokens: int) -> PackInputs:
        c = self.core
        H, HV, K, V = c.num_heads, c.num_value_heads, c.head_dim, c.value_head_dim
        return PackInputs(
            self._random(1, tokens, H, K).to(c.device, c.dtype),
            self._random(1, tokens, H, K).to(c.device, c.dtype),
            self._random(1, tokens, HV, V).to(c.device, c.dtype),
            (self._random(1, tokens, HV, K) - 2.0).to(c.device, c.g_dtype),
            self._random(1, tokens, HV).to(c.device, c.beta_dtype),
        )

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def _ends(new: Sequence[PackInputs]) -> Tensor:
    return torch.tensor(list(accumulate((x.q.shape[1] for x in new), initial=0)))


def _block_errors(got: Tensor, want: Tensor, new: Sequence[PackInputs]) -> Tensor:
    """Of BLOCK tokens of a head each, in a row."""
    return torch.cat([x.flatten() for x in block_errors(got, want, _ends(new), BLOCK)])


def _join(pieces: Sequence[PackInputs]) -> PackInputs:
    return PackInputs(*(torch.cat(x, 1) for x in zip(*pieces)))


def _filled(x: PackInputs, value: float) -> PackInputs:
    return PackInputs(*(torch.full_like(y, value) for y in x))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
