// PTX of common/wgmma.cuh, for the emulated GPU.
#pragma once

KDA_DEVICE void wgmma_fence() {}
KDA_DEVICE void wgmma_commit() { simt::wgmma_commit(); }
template <int kPending>
KDA_DEVICE void wgmma_wait() {
    simt::wgmma_wait(kPending);
}
template <int kTiles>
KDA_DEVICE void pin(float (&)[kTiles][4]) {}

template <bool kAccumulate>
KDA_DEVICE void wgmma_n64(float (&c)[4][4], float (&d)[4][4], const u32 (&a)[4], u64 b) {
    float* const tiles[8] = {c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]};
    simt::wgmma(tiles, 8, a, b, false, kAccumulate);
}
KDA_DEVICE void wgmma_n128_rows(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    float* tiles[16];
    for (int i = 0; i < 16; ++i) tiles[i] = d[i];
    simt::wgmma(tiles, 16, a, b, true, true);
}

KDA_DEVICE void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    const u32 r[4] = {r0, r1, r2, r3};
    simt::store_matrices(address, r, true);
}
