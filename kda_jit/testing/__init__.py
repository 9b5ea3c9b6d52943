"""Test material for kda_jit and for its users: cases, strategies over them, comparison.

    from kda_jit.testing import Case, assert_close, plain_loss

    case = Case(seed=3, lengths=(65, 0, 128), heads=2, regime="repeated")
    x = case.tensors("cuda", torch.bfloat16)
    want = x.reference()
    out, final_state = kda_jit.prefill(*x.args, **x.kwargs)
    assert_close("out", out, want.out, Limit(plain_loss(x).out), cu_seqlens=x.cu_seqlens, case=case)

`kda_jit.testing.laws` holds what every prefill obeys, `kda_jit.testing.verify` a run of all of it
(the command `kda-jit verify`), and `kda_jit.testing.faults` faults to try the laws on.
`kda_jit.testing.strategies` needs Hypothesis and is therefore imported by name.
"""

from .cases import REGIMES, TABLE_ROWS, Case, Inputs
from .numeric import (
    Limit,
    Mismatch,
    PlainLoss,
    Worst,
    assert_close,
    block_errors,
    error_along,
    plain_loss,
    relative_rms,
    worst_block_error,
    worst_state_error,
)
from .oracle import run_recurrent_reference, run_reference
from .steps import Step

__all__ = [
    "REGIMES",
    "TABLE_ROWS",
    "Case",
    "Inputs",
    "Limit",
    "Mismatch",
    "PlainLoss",
    "Step",
    "Worst",
    "assert_close",
    "block_errors",
    "error_along",
    "plain_loss",
    "relative_rms",
    "run_recurrent_reference",
    "run_reference",
    "worst_block_error",
    "worst_state_error",
]
