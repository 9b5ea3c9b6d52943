"""Benchmarks that check before they time: `python -m kda_jit.bench`.

registry   the cases: shapes that are timed, inputs whose errors are tabled
subject    what is timed: a backend of ours under a schedule, or a peer
peers      FlashKDA and fla, behind the same interface
gate       no time for a wrong result, nor for another kernel than the one asked for
timer      medians with a cold L2, graph replay, host time, copy bandwidth
machine    the GPU, versions and commit that a number belongs to
report     a run as a table, json or markdown
run        the command
"""
