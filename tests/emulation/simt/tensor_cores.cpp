// Matrix products: mma.sync at once, wgmma at any time until its wait.
//
// The products of an instruction are exact and summed in double with the accumulator, then rounded once to fp32. The hardware sums in
// another order and with fewer bits; results agree to rounding, and those of one instruction do not depend on which kernel issues it.
#include "machine.hpp"

#include <algorithm>
#include <cstring>

#include "formats.hpp"

namespace simt {

namespace {

// c [16 x 8] += a [16 x depth] b [depth x 8], with C in the fragment layout of mma.m16n8: four values a lane.
template <int kDepth>
void multiply(float (&c)[kWarpSize][4], const float (&a)[16][kDepth], const float (&b)[kDepth][8], bool accumulate) {
    double sum[16][8];
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; ++j) sum[i][j] = accumulate ? static_cast<double>(c[(i % 8) * 4 + j / 2][2 * (i / 8) + j % 2]) : 0.0;
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < kDepth; ++k) {
            const double x = a[i][k];
            for (int j = 0; j < 8; ++j) sum[i][j] += x * b[k][j];
        }
    }
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; ++j) c[(i % 8) * 4 + j / 2][2 * (i / 8) + j % 2] = static_cast<float>(sum[i][j]);
}

// What a lane holds of A [16 x 16] in 16 bits.
template <typename Widen>
void set_a(float (&a)[16][16], int lane, const u32* r, Widen widen) {
    const int row = lane / 4, column = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
        float* at = &a[row + 8 * (i % 2)][column + 8 * (i / 2)];
        at[0] = widen(static_cast<u16>(r[i]));
        at[1] = widen(static_cast<u16>(r[i] >> 16));
    }
}

struct MmaOperands {
    Format format;
    float* c;
    const u32 *a, *b;
};

template <typename Widen>
void mma_16(Warp& warp, float (&c)[kWarpSize][4], Widen widen) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const auto* x = static_cast<const MmaOperands*>(warp.operands[lane]);
        set_a(a, lane, x->a, widen);
        for (int i = 0; i < 2; ++i) {
            const int row = 2 * (lane % 4) + 8 * i;
            b[row][lane / 4] = widen(static_cast<u16>(x->b[i]));
            b[row + 1][lane / 4] = widen(static_cast<u16>(x->b[i] >> 16));
        }
    }
    multiply<16>(c, a, b, true);
}
void mma_tf32(Warp& warp, float (&c)[kWarpSize][4]) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const auto* x = static_cast<const MmaOperands*>(warp.operands[lane]);
        const int group = lane / 4, place = lane % 4;
        for (int i = 0; i < 4; ++i) a[group + 8 * (i % 2)][place + 4 * (i / 2)] = tf32(x->a[i]);
        for (int i = 0; i < 2; ++i) b[place + 4 * i][group] = tf32(x->b[i]);
    }
    multiply<8>(c, a, b, true);
}

}  // namespace

void mma(Format format, float (&c)[4], const u32* a, const u32* b) {
    MmaOperands mine{format, c, a, b};
    machine.together(Together::kMma, &mine, SIMT_HERE, [format](Warp& warp) {
        float all[kWarpSize][4];
        for (int lane = 0; lane < kWarpSize; ++lane) std::memcpy(all[lane], static_cast<MmaOperands*>(warp.operands[lane])->c, sizeof all[lane]);
        switch (format) {
        case Format::kF16: mma_16(warp, all, f16_to_float); break;
        case Format::kBf16: mma_16(warp, all, bf16_to_float); break;
        case Format::kTf32: mma_tf32(warp, all); break;
        }
        for (int lane = 0; lane < kWarpSize; ++lane) std::memcpy(static_cast<MmaOperands*>(warp.operands[lane])->c, all[lane], sizeof all[lane]);
    });
}

// -- wgmma -------------------------------------------------------------------------------------------------------------------------------

namespace {

struct WgmmaOperands {
    float* const* d;
    const u32* a;
    u64 operand;
};

// The matrix operand in shared memory that a descriptor names.
class SharedOperand {
public:
    SharedOperand(Cta& cta, u64 descriptor)
        : cta_(cta), start_((descriptor & 0x3fff) << 4), leading_((descriptor >> 16 & 0x3fff) << 4), stride_((descriptor >> 32 & 0x3fff) << 4),
          swizzle_(static_cast<u32>(descriptor >> 62)) {
        if (swizzle_ != 1 && swizzle_ != 2) machine.fail("a matrix descriptor with a swizzle that is not emulated");
    }
    // Columns 8 tile .. 8 tile + 7 of B [16 x n], of which B's transpose has rows of 16 elements (K-major), or B rows of 64 (MN-major).
    void load(float (&b)[16][8], int tile, bool rows_of_b) const {
        u16 piece[8];
        if (rows_of_b) {
            for (int k = 0; k < 16; ++k) {
                fetch(piece, tile / 8 * leading_ + k / 8 * stride_ + k % 8 * row_bytes() + tile % 8 * 16);
                for (int j = 0; j < 8; ++j) b[k][j] = f16_to_float(piece[j]);
            }
        } else {
            for (int j = 0; j < 8; ++j) {
                for (int half = 0; half < 2; ++half) {
                    fetch(piece, tile * stride_ + j * row_bytes() + half * 16);
                    for (int k = 0; k < 8; ++k) b[8 * half + k][j] = f16_to_float(piece[k]);
                }
            }
        }
    }

private:
    u32 row_bytes() const { return swizzle_ == 1 ? 128 : 64; }
    void fetch(u16 (&piece)[8], u32 offset) const {
        u32 address = start_ + offset;
        address ^= swizzle_ == 1 ? (address >> 7 & 7) << 4 : (address >> 7 & 3) << 4;
        std::memcpy(piece, cta_.at(address, 16, 16), 16);
    }
    Cta& cta_;
    u32 start_, leading_, stride_, swizzle_;
};

// Reads shared memory as it is now.
void compute(Warp& warp, Product& product) {
    const SharedOperand operand(*warp.cta, product.operand);
    for (std::size_t tile = 0; tile < product.tiles.size(); ++tile) {
        float b[16][8];
        operand.load(b, static_cast<int>(tile), product.rows_of_b);
        multiply<16>(product.tiles[tile]->value, product.a, b, product.accumulate);
    }
    product.done = true;
}

// The hardware reads A at any time until the wait.
void check_a(const Product& product) {
    for (int lane = 0; lane < kWarpSize; ++lane)
        if (std::memcmp(product.a_at[lane], product.a_words[lane], sizeof product.a_words[lane]) != 0)
            machine.fail("registers with A of a product in flight were written");
}

// The registers in flight: NaN for whoever reads them, their values put aside.
Tile* take_tile(Warp& warp, int index) {
    float* first = static_cast<WgmmaOperands*>(warp.operands[0])->d[index];
    for (auto& tile : warp.tiles)
        if (tile->at[0] == first) return tile.get();
    auto tile = std::make_unique<Tile>();
    tile->pending = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) {
        tile->at[lane] = static_cast<WgmmaOperands*>(warp.operands[lane])->d[index];
        std::memcpy(tile->value[lane], tile->at[lane], sizeof tile->value[lane]);
        std::memset(tile->at[lane], 0xff, sizeof tile->value[lane]);
    }
    warp.tiles.push_back(std::move(tile));
    return warp.tiles.back().get();
}

void give_back_tiles(Warp& warp) {
    auto& tiles = warp.tiles;
    for (auto& tile : tiles) {
        if (tile->pending == 0)
            for (int lane = 0; lane < kWarpSize; ++lane) std::memcpy(tile->at[lane], tile->value[lane], sizeof tile->value[lane]);
    }
    tiles.erase(std::remove_if(tiles.begin(), tiles.end(), [](const auto& tile) { return tile->pending == 0; }), tiles.end());
}

}  // namespace

void wgmma(float* const* d, int tiles, const u32 (&a)[4], u64 operand, bool rows_of_b, bool accumulate) {
    WgmmaOperands mine{d, a, operand};
    machine.together(Together::kWgmma, &mine, SIMT_HERE, [=](Warp& warp) {
        Product product;
        product.operand = operand;
        product.rows_of_b = rows_of_b, product.accumulate = accumulate, product.done = false;
        product.group = warp.wgmma_group;
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const auto* x = static_cast<const WgmmaOperands*>(warp.operands[lane]);
            if (x->operand != operand) machine.fail("lanes of a warp have different matrix descriptors");
            set_a(product.a, lane, x->a, f16_to_float);
            product.a_at[lane] = x->a;
            std::memcpy(product.a_words[lane], x->a, sizeof product.a_words[lane]);
        }
        for (int i = 0; i < tiles; ++i) product.tiles.push_back(take_tile(warp, i)), ++product.tiles.back()->pending;
        warp.products.push_back(std::move(product));
        warp.products_issued = (warp.products_issued + (operand ^ static_cast<u64>(tiles))) * 0x9e3779b97f4a7c15 + 1;
        if (!machine.random.one_in(machine.style.eager)) return;
        for (Product& earlier : warp.products)
            if (!earlier.done) compute(warp, earlier);
    });
}
void wgmma_commit() {
    machine.together(Together::kCommit, nullptr, SIMT_HERE, [](Warp& warp) { ++warp.wgmma_group; });
}
void wgmma_wait(int pending) {
    machine.together(Together::kWgmmaWait, nullptr, SIMT_HERE, [pending](Warp& warp) {
        const u32 end = warp.wgmma_group - std::min<u32>(pending, warp.wgmma_group);
        while (!warp.products.empty() && warp.products.front().group < end) {
            Product& product = warp.products.front();
            if (!product.done) compute(warp, product);
            check_a(product);
            for (Tile* tile : product.tiles) --tile->pending;
            warp.products.pop_front();
        }
        give_back_tiles(warp);
    });
}

}  // namespace simt
