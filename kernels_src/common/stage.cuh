// The stage image: what the prepare step hands to the recurrence for one chunk of one value head.
//
//   k_decayed  f16 [32 x 128]  k_t exp(G_t) * kKeyScale               X = S k_decayed   G: gate cumsum from the chunk's start
//   q_decayed  f16 [32 x 128]  q_t exp(G_t) * kQueryScale             O = S q_decayed + R A_q
//   a_k        f16 [32 x 128]  T^T k_restored * 2^s * kWriteScale     S' = D S + A_k^T R      R = V - X
//   a_q        f16 [32 x 32]   M T * kQueryScale * kWriteScale
//   decay      f32 [4 x 36]    exp(G_last)                        D   channel 8 n + 2 t + e at [t][2 n + e]: see decay_offset
//   shift      f32, i32        2^s and s
//
// k and q have unit length, T = (I + A)^-1 diag(beta) and beta < 1, so every entry is at most 1 before its power of two; the
// powers keep small entries out of f16's subnormals. R is fed divided by kWriteScale, which undoes that of a_k and a_q.
// Row-major tiles of 128-byte rows (64 elements, two tiles a matrix) with the 16-byte pieces of a row XORed by row % 8:
// conflict-free for ldmatrix, and the 128-byte swizzle of wgmma. The first tiles of k_decayed, q_decayed and a_k come first, then the
// second ones, so that the 64 rows of k_decayed and q_decayed are one operand. a_q has rows of 64 bytes, pieces XORed by (row / 2) % 4:
// the 64-byte swizzle.
#pragma once
#include "common/types.cuh"

constexpr int kChunk = 32;    // tokens a chunk
constexpr int kBlock = 16;    // tokens over which exp(+G) and exp(-G) stay in range: 16 * 5 < 88
constexpr int kHeadDim = 128; // K and V

constexpr int kRowBytes = 128;
constexpr int kHalfTile = kChunk * kRowBytes;  // 64 channels of all tokens
constexpr int kKDecayed = 0;
constexpr int kQDecayed = kKDecayed + kHalfTile;
constexpr int kAk = kQDecayed + kHalfTile;
constexpr int kHalfStride = kAk + kHalfTile;  // from a matrix's first tile to its second
constexpr int kAq = 2 * kHalfStride;
constexpr int kDecay = kAq + kChunk * kChunk * 2;
constexpr int kShift = kDecay + 4 * 36 * 4;
constexpr int kStageBytes = kShift + 64;

constexpr float kKeyScale = 0x1p11f;
constexpr float kQueryScale = 0x1p8f;
constexpr float kWriteScale = 0x1p7f;  // times kQueryScale, a_q's: at most 2^15

// Byte offset of the 16-byte piece holding channels [8 piece, 8 piece + 8) of `row`.
KDA_DEVICE int tile_offset(int row, int piece) {
    return (piece >> 3) * kHalfStride + row * kRowBytes + (((piece & 7) ^ (row & 7)) << 4);
}
// The same in a_q: columns [8 piece, 8 piece + 8) of `row`.
KDA_DEVICE int aq_offset(int row, int piece) { return row * 64 + ((piece ^ ((row >> 1) & 3)) << 4); }
// The decays of channels 8 n + 2 tid and 8 n + 2 tid + 1: a lane reads two n at a time, and no two of a quad from one bank.
KDA_DEVICE int decay_offset(int n, int tid) { return kDecay + tid * 36 * 4 + 8 * n; }
