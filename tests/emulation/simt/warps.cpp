// Operations of a whole warp: votes, shuffles, 8x8 matrices between lanes and shared memory.
#include "machine.hpp"

#include <cstring>

namespace simt {

void whole_warp(u32 mask) {
    if (mask != kAllLanes) machine.fail("an operation of some lanes of a warp, which is not emulated");
}

void sync_warp() {
    machine.together(Together::kSync, nullptr, SIMT_HERE, [](Warp&) {});
}

namespace {
struct Shuffle {
    u32 value;
    int source;
    u32 result;
};
struct Reduction {
    u32 value, result;
};
template <typename Combine>
u32 reduce(Together what, u32 value, const void* where, Combine combine) {
    Reduction mine{value, 0};
    machine.together(what, &mine, where, [&](Warp& warp) {
        u32 all = 0;
        for (int i = 0; i < kWarpSize; ++i) all = combine(all, static_cast<Reduction*>(warp.operands[i])->value, i);
        for (void* lane : warp.operands) static_cast<Reduction*>(lane)->result = all;
    });
    return mine.result;
}
}  // namespace

u32 shuffle(u32 value, int source) {
    Shuffle mine{value, source & 31, 0};
    machine.together(Together::kShuffle, &mine, SIMT_HERE, [](Warp& warp) {
        for (void* operands : warp.operands) {
            auto* lane = static_cast<Shuffle*>(operands);
            lane->result = static_cast<Shuffle*>(warp.operands[lane->source])->value;
        }
    });
    return mine.result;
}
u32 ballot(bool vote) {
    return reduce(Together::kBallot, vote, SIMT_HERE, [](u32 all, u32 x, int i) { return all | x << i; });
}
u32 reduce_or(u32 value) {
    return reduce(Together::kOr, value, SIMT_HERE, [](u32 all, u32 x, int) { return all | x; });
}
u32 reduce_max(u32 value) {
    return reduce(Together::kMax, value, SIMT_HERE, [](u32 all, u32 x, int) { return x > all ? x : all; });
}

// An 8x8 matrix of 16-bit elements in a warp: lane i has row i / 4, columns 2 (i % 4) and the next.
namespace {
struct Load {
    u16 row[8];
    u32* r;
};
struct Store {
    u32 address;
    const u32* r;
};
using Matrix = u16[8][8];

u32 lane_pair(const Matrix& m, int lane, bool transposed) {
    const int row = lane / 4, column = 2 * (lane % 4);
    const u32 lo = transposed ? m[column][row] : m[row][column], hi = transposed ? m[column + 1][row] : m[row][column + 1];
    return lo | hi << 16;
}
void set_lane_pair(Matrix& m, int lane, bool transposed, u32 pair) {
    const int row = lane / 4, column = 2 * (lane % 4);
    (transposed ? m[column][row] : m[row][column]) = static_cast<u16>(pair);
    (transposed ? m[column + 1][row] : m[row][column + 1]) = static_cast<u16>(pair >> 16);
}
}  // namespace

// A lane reads its row when it comes, as if it were by itself: only a barrier says that what others wrote is there.
void load_matrices(u32 (&r)[4], u32 address, bool transposed) {
    Load mine;
    machine.lane().where = SIMT_HERE;
    std::memcpy(mine.row, machine.shared(own(address), 16, 16), 16);
    mine.r = r;
    machine.together(Together::kLoad, &mine, SIMT_HERE, [transposed](Warp& warp) {
        for (int tile = 0; tile < 4; ++tile) {
            Matrix m;
            for (int row = 0; row < 8; ++row) std::memcpy(m[row], static_cast<Load*>(warp.operands[8 * tile + row])->row, 16);
            for (int i = 0; i < kWarpSize; ++i) static_cast<Load*>(warp.operands[i])->r[tile] = lane_pair(m, i, transposed);
        }
    });
}
void store_matrices(u32 address, const u32 (&r)[4], bool transposed) {
    Store mine{own(address), r};
    machine.together(Together::kStore, &mine, SIMT_HERE, [transposed](Warp& warp) {
        for (int tile = 0; tile < 4; ++tile) {
            Matrix m;
            for (int i = 0; i < kWarpSize; ++i) set_lane_pair(m, i, transposed, static_cast<Store*>(warp.operands[i])->r[tile]);
            for (int row = 0; row < 8; ++row) {
                const u32 to = static_cast<Store*>(warp.operands[8 * tile + row])->address;
                std::memcpy(machine.shared(to, 16, 16), m[row], 16);
            }
        }
    });
}
u32 transpose_matrix(u32 x) {
    Reduction mine{x, 0};
    machine.together(Together::kTranspose, &mine, SIMT_HERE, [](Warp& warp) {
        Matrix m;
        for (int i = 0; i < kWarpSize; ++i) set_lane_pair(m, i, false, static_cast<Reduction*>(warp.operands[i])->value);
        for (int i = 0; i < kWarpSize; ++i) static_cast<Reduction*>(warp.operands[i])->result = lane_pair(m, i, true);
    });
    return mine.result;
}

}  // namespace simt
