"""Tokens of a mixed step: five inputs gathered into two packed groups, two outputs put back.

A group is a list of token indices whose live length only the device knows: it is the last entry of
the group's query_start_loc. The index buffers may be longer than that and hold anything there, so
that one CUDA graph serves every division of a step. In the packed buffers the first group has rows
[0, first_rows) and the second those from first_rows on: places that the host knows.

in      q k [T,H*K]  v [T,HV*V]  g [T,HV*K]  beta [T,HV]: any dtype, token-strided, dense in a token
        indices int32 or int64
out     the same, packed: row i of a group is token index[i]; rows past the live count keep their
        bytes
launch  grid (first_rows + second_rows, blocks of the widest tensor)
guards  an index outside [0, num_tokens) names no token: nothing is read or written for it
"""

import triton
import triton.language as tl


@triton.jit
def _locate(row, first_tokens, second_tokens, first_count, second_count, first_rows, num_tokens):
    """(token that belongs to a packed row, whether there is one)."""
    if row < first_rows:
        live = row < tl.load(first_count).to(tl.int64)
        token = tl.load(first_tokens + row, live, 0).to(tl.int64)
    else:
        live = row - first_rows < tl.load(second_count).to(tl.int64)
        token = tl.load(second_tokens + (row - first_rows), live, 0).to(tl.int64)
    return token, live & (token >= 0) & (token < num_tokens)


@triton.jit
def _copy_row(source, target, cols, WIDTH: tl.constexpr):
    mask = cols < WIDTH
    tl.store(target + cols, tl.load(source + cols, mask), mask)


@triton.jit(
    do_not_specialize=["first_rows", "num_tokens", "beta_stride"],
    do_not_specialize_on_alignment=[
        "beta", "beta_packed", "first_tokens", "second_tokens", "first_count", "second_count",
    ],
)  # fmt: skip
def kda_pack(
    q,
    k,
    v,
    g,
    beta,
    q_packed,
    k_packed,
    v_packed,
    g_packed,
    beta_packed,
    first_tokens,
    second_tokens,
    first_count,
    second_count,
    first_rows,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    QK_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    G_WIDTH: tl.constexpr,
    BETA_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of all five inputs, one block of columns of each."""
    row = tl.program_id(0).to(tl.int64)
    token, live = _locate(
        row, first_tokens, second_tokens, first_count, second_count, first_rows, num_tokens
    )
    if not live:
        return
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _copy_row(q + token * q_stride, q_packed + row * QK_WIDTH, cols, QK_WIDTH)
    _copy_row(k + token * k_stride, k_packed + row * QK_WIDTH, cols, QK_WIDTH)
    _copy_row(v + token * v_stride, v_packed + row * V_WIDTH, cols, V_WIDTH)
    _copy_row(g + token * g_stride, g_packed + row * G_WIDTH, cols, G_WIDTH)
    if tl.program_id(1) * BLOCK < BETA_WIDTH:  # the other blocks are spared an empty copy
        _copy_row(beta + token * beta_stride, beta_packed + row * BETA_WIDTH, cols, BETA_WIDTH)


@triton.jit(
    do_not_specialize=["first_rows", "num_tokens"],
    do_not_specialize_on_alignment=["first_tokens", "second_tokens", "first_count", "second_count"],
)
def kda_scatter(
    packed,
    out,
    first_tokens,
    second_tokens,
    first_count,
    second_count,
    first_rows,
    num_tokens,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of the packed outputs back to its token, one block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    token, live = _locate(
        row, first_tokens, second_tokens, first_count, second_count, first_rows, num_tokens
    )
    if not live:
        return
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _copy_row(packed + row * WIDTH, out + token * out_stride, cols, WIDTH)
