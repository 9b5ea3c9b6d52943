"""What torch.compile calls without looking inside. Imported while it traces, and only then."""

import torch

from kda_jit.chunk.call import run_now

run = torch.compiler.disable(run_now)
