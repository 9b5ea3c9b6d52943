"""Benchmarks that check before they time: the command `kda-jit bench`.

registry   the suites: shapes that are timed, inputs whose errors are tabled
cases      what a case is, and prefills; steps: those of an engine
subject    what is timed: a backend of ours under a schedule, or a peer
           step_subjects: `kda_jit.recurrent` and `KDACore`
peers      FlashKDA and fla, behind the same interface
           step_peers: vLLM's recurrent kernels and its layer; vllm_sources loads them
gate       no time for a wrong result, nor for another kernel than the one asked for
           step_gate: the same for steps
lineup     who runs which case
timer      medians with a cold L2, graph replay, host time, copy bandwidth; wall: without a GPU
machine    the GPU, versions and commit that a number belongs to
rows       one case, checked and timed; one input, its errors tabled
run        a whole run
report     a run as a table, json or markdown; against: beside an earlier one
plot       a run as pictures; shapes: what they need of it
"""
