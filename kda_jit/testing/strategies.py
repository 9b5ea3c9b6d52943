"""Hypothesis strategies over Case: they draw a description, never a tensor element."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from .cases import BOUNDED, EDGE_LENGTHS, UNBOUNDED, Case
from .laws import Law

__all__ = ["BOUNDED", "EDGE_LENGTHS", "UNBOUNDED", "cases", "cases_for"]


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_sequences: int = 4,
    max_length: int = 130,
    max_heads: int = 2,
    regimes: Sequence[str] = BOUNDED,
    initial: bool | None = None,
    grouped: bool = True,
    dense: bool = True,
) -> Case:
    """A small case. `initial` fixes whether there is an initial state.

    grouped  also draw HV > H; dense: also draw unpacked batches. Shrinks towards one short
    sequence of one head in the first regime.
    """
    length = st.sampled_from([n for n in EDGE_LENGTHS if n <= max_length]) | st.integers(
        0, max_length
    )
    packed = not dense or draw(st.booleans())
    if packed:
        lengths = draw(st.lists(length, min_size=1, max_size=max_sequences))
    else:
        lengths = [draw(length)] * draw(st.integers(1, max(1, max_sequences // 2)))
    heads = draw(st.integers(1, max_heads))
    group = draw(st.sampled_from((1, 1, 2))) if grouped else 1
    return Case(
        seed=draw(st.integers(0, 999)),
        lengths=tuple(lengths),
        heads=heads,
        value_heads=None if group == 1 else group * heads,
        regime=draw(st.sampled_from(tuple(regimes))),
        state_dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        initial=draw(st.booleans()) if initial is None else initial,
        packed=packed,
        padding=draw(st.sampled_from((0, 0, 1, 16, 50))) if packed else 0,
    )


def cases_for(law: Law, *, unbounded: bool = False) -> st.SearchStrategy[Case]:
    """Cases that a law is worth trying on, of the bounded gate or of the unbounded one."""
    return cases(
        max_sequences=law.sequences,
        regimes=[name for name in law.regimes if (name in UNBOUNDED) == unbounded],
        initial=law.initial,
        grouped=law.grouped,
        dense=not law.packed,
    )
