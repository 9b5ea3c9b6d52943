"""The backends. ``kda_jit.resolver`` imports each one only when it is first asked about it."""
