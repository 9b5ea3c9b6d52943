"""fla's ``chunk_kda`` on the backends of this package: one call, its forms, and who runs them.

call      the public function and its checks; a call that is ready to run
forms     in which form q, k, g and beta came, and what fits them to a prefill at what cost
choice    which backend runs them: those that come raw are a `kda_jit.prefill`
by_triton, by_torch   those that came activated, or in a form that no prefill has
"""

from kda_jit.chunk.call import ChunkCall, chunk_kda, prepare_chunk

__all__ = ["ChunkCall", "chunk_kda", "prepare_chunk"]
