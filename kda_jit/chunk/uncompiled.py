"""What torch.compile calls without looking inside. Imported while it traces, and only then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_jit.chunk.call import prepare_chunk


@torch.compiler.disable
def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda`"""
    return prepare_chunk(*args, **kwargs).run()
