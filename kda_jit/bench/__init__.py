"""Benchmarks that check before they time: `python -m kda_jit.bench`.

registry   the cases: shapes that are timed, inputs whose errors are tabled
cases      what a case is, and prefills; steps: those of an engine
subject    what is timed: a backend of ours under a schedule, or a peer
           step_subjects: `kda_jit.recurrent` and `KDACore`
peers      FlashKDA and fla, behind the same interface
           step_peers: vLLM's recurrent kernels and its layer; vllm_sources loads them
gate       no time for a wrong result, nor for another kernel than the one asked for
           step_gate: the same for steps
lineup     who runs which case
timer      medians with a cold L2, graph replay, host time, copy bandwidth
machine    the GPU, versions and commit that a number belongs to
report     a run as a table, json or markdown
run        the command
"""
