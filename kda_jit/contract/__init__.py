"""The argument contract of :func:`kda_jit.prefill`: checked, defaulted and reshaped here only.

:func:`make_problem` turns the caller's arguments into a :class:`KdaProblem` or raises one error
that names the argument, what was expected and what was found. Everything is checked before
anything is allocated or launched, so a refused call leaves every buffer as it was.

Nothing here reads device memory. The *contents* of ``cu_seqlens``, ``state_indices`` and
``checkpoint_offsets`` are therefore checked only where they are host-visible, that is when the
whole call is on the CPU. A legal call costs a few microseconds: tensors are checked in full only
when none like them have passed before (:mod:`kda_jit.contract.layout`), and the words are put
together only once something is known to be wrong.
"""

from kda_jit.contract.checks import CHECKPOINT_GRANULE, LOWEST_BOUND
from kda_jit.contract.memory import ALIGNMENT
from kda_jit.contract.problem import KdaProblem, make_problem

__all__ = ["ALIGNMENT", "CHECKPOINT_GRANULE", "LOWEST_BOUND", "KdaProblem", "make_problem"]
