"""What `kda-jit doctor` does: look at the machine, judge what was found, say what to type.

facts     what there is to know, as plain data: tests make their own
probes    looks: each catches what goes wrong and keeps it as a fact
rules     facts -> findings, each with a fix
"""

from kda_jit.doctor.facts import Facts
from kda_jit.doctor.probes import gather
from kda_jit.doctor.rules import Finding, Level, judge

__all__ = ["Facts", "Finding", "Level", "gather", "judge"]
