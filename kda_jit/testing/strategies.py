"""Hypothesis strategies over Case: they draw a description, never a tensor element."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from .cases import REGIMES, Case

#: Around the edges of every chunk size in use (16, 32, 64), and off them.
EDGE_LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 130)
BOUNDED = tuple(
    name
    for name in REGIMES
    if not name.startswith(("unbounded", "table_"))  # the table's rows are for long sequences
)
UNBOUNDED = ("unbounded", "unbounded_real")


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
