"""What a step of an engine holds, and how it is divided: plain numbers, decided before any launch.

A step has up to two groups of sequences. The *non-speculative* one holds decodes (one token each,
first) and prefills; the *speculative* one holds sequences whose drafts are verified. A step with
one group is run where its tokens lie and writes straight into the layer's output. A step with both
is packed, run, and scattered back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kda_jit.contract.checks import (
    INDEX_DTYPES,
    check_contents,
    check_per_sequence,
    check_state,
)
from kda_jit.contract.words import refuse_device, refuse_dtype, refuse_shape
from kda_jit.errors import InputError, InputTypeError, OutputConflictError, WorkspaceError

#: SM cycles that a sequence of one token costs per value head in the chunked kernels, which prepare
#: a whole chunk for it: 32 tokens of 100 cycles.
CHUNK_CYCLES = 3200
#: Cycles that the launches cost which decodes of their own add to a step, about 6 us.
APART_CYCLES = 10_000


@dataclass(frozen=True, eq=False)
class StepMetadata:
    """One step, shared by all layers. Counts are host numbers, everything else device tensors.

    num_actual_tokens   rows of the step; tensors may have more, which are padding
    num_decodes, num_prefills
                        non-speculative sequences: decodes come first and hold one token each
                        (or none, as padding, in a step of decodes alone)
    num_spec_decodes    speculative sequences

    Of the non-speculative sequences, N = num_decodes + num_prefills:

    non_spec_query_start_loc [N + 1]  int32 or int64: where each sequence starts, in tokens of its
                                      group, and the end of the last
    non_spec_state_indices [N]        int32 or int64, maybe strided (a column of a block table):
                                      slot of the pool, read and written; negative: none
    has_initial_state [N]             bool; False: a fresh sequence, whatever its slot holds.
                                      None: all have a state
    checkpoint_state [N, HV, V, K]    written: the state after the first
    checkpoint_offsets [N]            tokens of the sequence in this step, multiples of 16; 0: none

    Of the speculative sequences, N = num_spec_decodes:

    spec_query_start_loc [N + 1]      the same for their group: 1 + drafts tokens each, at most
    spec_state_indices [N, 1 + num_spec]  slots that take the states after each of those tokens
    num_accepted_tokens [N]           how many tokens of the step before were accepted: the
                                      sequence starts from the state in that column, less one

    Of a step with both groups:

    non_spec_token_indx, spec_token_indx
                                      int32 or int64: tokens of the step that the rows of each group
                                      are, each token once. Past the last live row (the last entry
                                      of query_start_loc) they may hold anything

    Tensors longer than N may be passed as they are: only the first entries count. Layers check the
    shapes of one object once, and the contents of its tensors may change between two steps.
    """

    num_actual_tokens: int
    num_prefills: int = 0
    num_decodes: int = 0
    num_spec_decodes: int = 0
    non_spec_query_start_loc: Tensor | None = None
    non_spec_state_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    checkpoint_state: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    spec_query_start_loc: Tensor | None = None
    spec_state_indices: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    non_spec_token_indx: Tensor | None = None
    spec_token_indx: Tensor | None = None
    #: What layers of one kind found out about this step, under keys of their own.
    memo: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_non_spec(self) -> int:
        return self.num_decodes + self.num_prefills


class Limits(NamedTuple):
    """The largest step that a layer was planned for."""

    max_num_batched_tokens: int
    max_num_seqs: int
    num_spec: int

    @property
    def packed_rows(self) -> int:
        """Rows of the packed buffers: index buffers may be padded, so the groups may not add up."""
        if self.num_spec == 0:
            return 0
        speculative = self.max_num_seqs * (1 + self.num_spec)
        return self.max_num_batched_tokens + min(self.max_num_batched_tokens, speculative)


class Part(NamedTuple):
    """Sequences [first, end) of a group, over rows [first_row, end_row) of the step or packed."""

    kind: Literal["prefill", "decode", "speculative"]
    first: int
    end: int
    first_row: int
    end_row: int


class StepPlan(NamedTuple):
    """The parts of a step in the order of their launches, and where they write.

    route     direct: rows of parts are those of the step; scatter: they are packed rows
    rows      of the non-speculative and of the speculative group; all rows there are, if packed
    """

    route: Literal["none", "direct", "scatter"]
    parts: tuple[Part, ...]
    rows: tuple[int, int]


def decodes_pay_apart(num_decodes: int, num_value_heads: int, sm_count: int) -> bool:
    """Whether decodes beside prefills should leave the chunked kernels for the recurrent one.

    There, each costs a chunk of preparation per value head; apart, they cost a launch or two more.
    A model: cycles over all SMs (what was measured is in docs/notes/layer.md). Off the GPU
    (sm_count 0) it always pays.
    """
    return num_decodes * num_value_heads * CHUNK_CYCLES > APART_CYCLES * sm_count


def plan_step(
    num_decodes: int, num_prefills: int, num_spec_decodes: int, rows: tuple[int, int], apart: bool
) -> StepPlan:
    """The parts of a step of such sequences.

    rows   capacity of the non-speculative and of the speculative group; a group alone has the
           step's tokens
    apart  whether decodes beside prefills are a part of their own

    Prefills come first: what a backend may refuse is refused before anything has been launched.
    """
    both = num_decodes + num_prefills
    first, end = rows[0], sum(rows)
    parts: list[Part] = []
    if num_prefills and num_decodes and apart:
        parts.append(Part("prefill", num_decodes, both, num_decodes, first))
        parts.append(Part("decode", 0, num_decodes, 0, num_decodes))
    elif num_prefills:
        parts.append(Part("prefill", 0, both, 0, first))
    elif num_decodes:
        parts.append(Part("decode", 0, both, 0, first))
    if num_spec_decodes:
        parts.append(Part("speculative", 0, num_spec_decodes, first, end))
    route: Literal["none", "direct", "scatter"] = "direct" if parts else "none"
    if both and num_spec_decodes:
        route = "scatter"
    return StepPlan(route, tuple(parts), rows)


def check_each_row_once(plan: StepPlan) -> None:
    """Raises unless the parts write each row of their target, and none twice."""
    written = 0
    for part in sorted(plan.parts, key=lambda part: part.first_row):
        if part.first_row != written or part.end_row < part.first_row:
            raise OutputConflictError(
                f"{part.kind}: expected to write rows from {written} on, got rows "
                f"[{part.first_row}, {part.end_row}) of a step with {plan}."
            )
        written = part.end_row
    if plan.parts and written != sum(plan.rows):
        raise OutputConflictError(
            f"step: expected {sum(plan.rows)} rows to be written, got {written} by {plan}."
        )


# -- checks --------------------------------------------------------------------------------------


def check_limits(m: StepMetadata, limits: Limits) -> None:
    """Counts against what was planned: host numbers alone."""
    if not isinstance(m, StepMetadata):
        raise InputTypeError(f"metadata: expected a StepMetadata, got {type(m).__name__}.")
    for name in ("num_actual_tokens", "num_prefills", "num_decodes", "num_spec_decodes"):
        value = getattr(m, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputTypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}.")
        if value < 0:
            raise InputError(f"{name}: expected at least 0, got {value}.")
    sequences = m.num_non_spec + m.num_spec_decodes
    _within("num_actual_tokens", m.num_actual_tokens, "max_num_batched_tokens", limits[0])
    _within("sequences of the step", sequences, "max_num_seqs", limits[1])
    if m.num_spec_decodes and limits.num_spec == 0:
        _within("num_spec_decodes", m.num_spec_decodes, "num_spec", 0)
    if m.num_decodes > m.num_actual_tokens and m.num_prefills:
        raise InputError(
            f"num_decodes: expected at most num_actual_tokens = {m.num_actual_tokens} beside "
            f"prefills, got {m.num_decodes}. A decode there holds one token."
        )
    columns = m.spec_state_indices
    if m.num_spec_decodes and isinstance(columns, Tensor) and columns.dim() == 2:
        _within(
            "drafts (columns of spec_state_indices, less one)",
            columns.shape[1] - 1,
            "num_spec",
            limits.num_spec,
        )


def _within(name: str, asked: int, parameter: str, planned: int) -> None:
    if asked > planned:
        raise WorkspaceError(
            f"KDACore: expected {name} to be at most {parameter} = {planned}, as planned, got "
            f"{asked}. Build the layer for the largest step; nothing was launched or written."
        )


class Sequences(NamedTuple):
    """The tensors of a step's sequences, checked and cut to their number; None: not in the step."""

    start_loc: Tensor | None
    state_indices: Tensor | None
    has_initial_state: Tensor | None
    checkpoint_state: Tensor | None
    checkpoint_offsets: Tensor | None
    spec_start_loc: Tensor | None
    spec_state_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    token_indx: Tensor | None
    spec_token_indx: Tensor | None


def check_sequences(m: StepMetadata, state_shape: tuple[int, int, int], index: int) -> Sequences:
    """Shapes, dtypes, strides and devices of all that the step names.

    state_shape  HV, V, K; index  get_device() of the layer's device
    """
    N, S = m.num_non_spec, m.num_spec_decodes
    mixed = N > 0 and S > 0
    offsets, saved = m.checkpoint_offsets if N else None, m.checkpoint_state if N else None
    if (offsets is None) != (saved is None):
        missing = "checkpoint_state" if saved is None else "checkpoint_offsets"
        raise InputError(
            f"checkpoint_state, checkpoint_offsets: expected both or neither, got {missing}=None."
        )
    if saved is not None:
        saved = _head("checkpoint_state", saved, N)
        check_state("checkpoint_state", saved, N, (N, *state_shape), index, True)
    has = m.has_initial_state if N else None
    return Sequences(
        _per_sequence("non_spec_query_start_loc", m.non_spec_query_start_loc, N, N + 1, index),
        _per_sequence(
            "non_spec_state_indices", m.non_spec_state_indices, N, N, index, strided=True
        ),
        None if has is None else _per_sequence("has_initial_state", has, N, N, index, flags=True),
        saved,
        None if offsets is None else _per_sequence("checkpoint_offsets", offsets, N, N, index),
        _per_sequence("spec_query_start_loc", m.spec_query_start_loc, S, S + 1, index),
        _table(m.spec_state_indices, S, index) if S else None,
        _per_sequence("num_accepted_tokens", m.num_accepted_tokens, S, S, index, strided=True),
        _token_index("non_spec_token_indx", m.non_spec_token_indx, index) if mixed else None,
        _token_index("spec_token_indx", m.spec_token_indx, index) if mixed else None,
    )


def _head(name: str, x: object, size: int) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() == 0:
        refuse_shape(name, x, f"[at least {size}, ...]", None, "The step has such sequences.")
    return x[:size]


def _per_sequence(
    name: str,
    x: Tensor | None,
    sequences: int,
    size: int,
    index: int,
    *,
    strided: bool = False,
    flags: bool = False,
) -> Tensor | None:
    if sequences == 0:
        return None
    cut = _head(name, x, size)
    dtypes = (torch.bool,) if flags else INDEX_DTYPES
    check_per_sequence(name, cut, size, dtypes, index, strided)
    return cut


def _table(x: Tensor | None, sequences: int, index: int) -> Tensor:
    """spec_state_indices: one row a sequence, as strided as the engine's block table is."""
    cut = _head("spec_state_indices", x, sequences)
    if cut.dim() != 2 or cut.shape[0] != sequences or cut.shape[1] == 0:
        refuse_shape("spec_state_indices", cut, "[N, 1 + num_spec]", (sequences, "1 + num_spec"))
    if cut.dtype not in INDEX_DTYPES:
        refuse_dtype("spec_state_indices", cut, INDEX_DTYPES)
    if cut.get_device() != index:
        refuse_device("spec_state_indices", cut, index)
    return cut


def _token_index(name: str, x: Tensor | None, index: int) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() != 1:
        refuse_shape(name, x, "[rows of the group]", None, "A step with both groups needs it.")
    if x.dtype not in INDEX_DTYPES:
        refuse_dtype(name, x, INDEX_DTYPES)
    check_per_sequence(name, x, x.shape[0], INDEX_DTYPES, index)
    return x


def packed_rows(m: StepMetadata, s: Sequences) -> tuple[int, int]:
    """Rows that the groups of a step take: host numbers, never less than the live counts."""
    T = m.num_actual_tokens
    if s.token_indx is not None and s.spec_token_indx is not None:
        assert s.spec_state_indices is not None
        speculative = m.num_spec_decodes * s.spec_state_indices.shape[1]
        return min(T, s.token_indx.shape[0]), min(T, s.spec_token_indx.shape[0], speculative)
    return (T, 0) if m.num_non_spec else (0, T if m.num_spec_decodes else 0)


def check_host_contents(m: StepMetadata, s: Sequences, rows: tuple[int, int], pool: Tensor) -> None:
    """Values of the step's tensors where the host can see them, that is on the CPU."""
    N, S, T = m.num_non_spec, m.num_spec_decodes, m.num_actual_tokens
    slots: list[tuple[str, list[int]]] = []
    if N:
        check_contents(1, rows[0], N, s.start_loc, s.state_indices, pool, s.checkpoint_offsets)
        assert s.start_loc is not None and s.state_indices is not None
        starts = s.start_loc.tolist()
        for i in range(m.num_decodes):
            length = starts[i + 1] - starts[i]
            if length > 1 or (length == 0 and m.num_prefills):
                raise InputError(
                    "non_spec_query_start_loc: expected one token for each of the first "
                    f"{m.num_decodes} sequences (num_decodes), got {length} for sequence {i}."
                )
        slots.append(("non_spec_state_indices", s.state_indices.tolist()))
    if S:
        assert s.spec_state_indices is not None and s.num_accepted_tokens is not None
        assert s.spec_start_loc is not None
        check_contents(1, rows[1], S, s.spec_start_loc, None, pool, None)
        columns = s.spec_state_indices.shape[1]
        starts = s.spec_start_loc.tolist()
        accepted = s.num_accepted_tokens.tolist()
        for i, row in enumerate(s.spec_state_indices.tolist()):
            length = starts[i + 1] - starts[i]
            if length == 0 or max(row) < 0:
                continue  # padding
            if length > columns:
                raise InputError(
                    f"spec_query_start_loc: expected at most {columns} tokens, one for each column "
                    f"of spec_state_indices, got {length} for sequence {i}."
                )
            if not 0 <= accepted[i] <= columns:
                raise InputError(
                    f"num_accepted_tokens: expected 0 to {columns}, got {accepted[i]} for sequence "
                    f"{i}."
                )
            touched = {row[accepted[i] - 1], *row[:length]} if accepted[i] else set()
            slots.append(("spec_state_indices", sorted(touched)))
    _check_slots(slots, pool.shape[0])
    if s.token_indx is not None and s.spec_token_indx is not None:
        assert s.start_loc is not None and s.spec_start_loc is not None
        _check_tokens_once(
            T,
            ("non_spec_token_indx", s.token_indx, int(s.start_loc[-1])),
            ("spec_token_indx", s.spec_token_indx, int(s.spec_start_loc[-1])),
        )


def _check_slots(slots: list[tuple[str, list[int]]], size: int) -> None:
    seen: dict[int, str] = {}
    for name, indices in slots:
        for slot in indices:
            if slot >= size:
                raise InputError(
                    f"{name}: expected slots below {size}, the size of the pool, got {slot}."
                )
            if slot >= 0 and slot in seen:
                raise InputError(
                    f"{name}: expected no slot twice in a step, got slot {slot}, which "
                    f"{seen[slot]} names too. Mark padding with -1."
                )
            seen[slot] = name


def _check_tokens_once(T: int, *groups: tuple[str, Tensor, int]) -> None:
    owner: dict[int, str] = {}
    for name, index, live in groups:
        for token in index[:live].tolist():
            if not 0 <= token < T:
                raise InputError(
                    f"{name}: expected tokens of the step, 0 to {T - 1}, in its first {live} "
                    f"entries, got {token}."
                )
            if token in owner:
                raise InputError(
                    f"{name}: expected each token once, got token {token}, which {owner[token]} "
                    "holds already. Its output row would be written twice."
                )
            owner[token] = name
