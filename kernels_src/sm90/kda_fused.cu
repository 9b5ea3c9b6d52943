// KDA prefill for Hopper in one kernel: a cluster of two SMs takes a value head, prepares its chunks in turns and
// runs half of V's columns each. Stage images never leave shared memory.
//
//   S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t
//
// in      FusedArgs: KdaArgs (common/kda_args.cuh) and tensor maps of q, k, g, v and out
// out     out bf16; final_state; checkpoint_state
// launch  kda_fused  clusters of 2, as many as run at once at most; 640 threads, kFusedSmem
// roles   four warps compute the chain of V's half `rank`; twelve prepare, four a chunk, every other chunk of the cluster's; one sends what
//         they made to the peer; one finds the pieces of work; one loads raw inputs; one moves V and O
// order   chunks of a cluster are numbered through all its pieces of units (sequence, value head); CTA `rank` prepares those with
//         number % 2 == rank
// shares  more units than clusters: all chunk slots of all units in a row, with some more for what a unit costs besides, a share of them to each
//         cluster, which works on its units from the last to the first. A unit that two of them share is begun by the first one, at once, and
//         ended by the second one, at last
//
//   own slots, 5      landed: loader, copies -> quad    ready: quad -> chain, sender    freed: chains of both CTAs -> loader, quad, sender
//   peer's images, 2  ready: the peer's copy -> chain   (freed: that of the slot they were copied from)
//   tiles, 4          full: mover -> chain        empty: chain -> mover
//   pieces, 16        full: finder -> loader, mover, sender, chain    empty: the other way, when all have taken note of one
//
// Why nobody waits forever: everything waits for something about an earlier chunk. A state is waited for that a cluster with a lower
// number makes first of all, or after it waited likewise; and CTAs start in the order of their numbers.
#include "common/cluster.cuh"
#include "common/prepare.cuh"
#include "common/sequence.cuh"
#include "common/tensor_map.cuh"
#include "sm90/chain.cuh"

// Of [batch row, token, channel of all heads]; boxes of 64 channels x 32 tokens, rows of 128 bytes with the 128-byte swizzle, which is that of tile_offset.
struct FusedArgs {
    KdaArgs kda;  // kda.workspace: where there are shares, HandedState [clusters]
    i64 share;    // slots of a cluster; 0: a cluster takes whole units in turn
    u64 call;     // no other call's number, nor anything else's; a flag that has it says that the state is there
    i64 change;   // slots of a unit besides those of its chunks
    u64 reserved;
    TensorMap q, k, g, v, out;
};
static_assert(sizeof(FusedArgs) == 960, "keep kda_jit/backends/cuda.py in step");

constexpr int kQuads = 3;      // of warps that prepare
constexpr int kThreads = 256 + kPrepareThreads * kQuads;  // at 96 registers
constexpr int kSlots = 5, kReceived = 2, kTiles = 4, kPieces = 16;

// An image, being made or complete, and its barriers.
struct alignas(1024) Slot {
    u8 image[kStageBytes];
    u64 ready, freed, landed;
};
static_assert(sizeof(Slot) == kImageBytes, "barriers fit behind an image");
constexpr int kReady = kStageBytes, kFreed = kReady + 8, kLanded = kFreed + 8;
// Of a tile, V's columns of a chunk and later O's; of a piece.
struct Barriers {
    u64 full, empty;
};
// Where a tile's rows of O go, and how many.
struct TileOutput {
    i64 token;  // of the batch row
    i32 row, column, valid;
};
// Chunks [first, last) of a unit, and its sequence, which is looked up once for all; n < 0: no more.
struct alignas(16) Piece {
    i32 n, hv, first, last;
    Sequence seq;
};

struct FusedSmem {
    Slot own[kSlots];
    Slot received[kReceived];
    alignas(1024) u8 tile[kTiles][kChainTile];
    PrepareScratch scratch[kQuads];
    Barriers tile_barriers[kTiles];
    TileOutput outputs[kTiles];
    Piece pieces[kPieces];
    Barriers piece_barriers[kPieces];
};
constexpr int kFusedSmem = 227328;
static_assert(sizeof(FusedSmem) == kFusedSmem, "keep kda_jit/backends/cuda.py in step");

// Goes round `kCount` pieces of shared memory.
template <int kCount, int kBytes>
struct Round {
    u32 index = 0, parity = 0;

    KDA_DEVICE u32 of(const void* first) const { return shared_address(first) + index * kBytes; }
    KDA_DEVICE void advance() {
        if (++index == kCount) index = 0, parity ^= 1;
    }
};
using SlotRound = Round<kSlots, sizeof(Slot)>;
KDA_DEVICE u32 empty_of(u32 full) { return full + 8; }
struct TileRound : Round<kTiles, kChainTile> {
    KDA_DEVICE u32 full(const FusedSmem& smem) const { return shared_address(smem.tile_barriers) + index * static_cast<u32>(sizeof(Barriers)); }
};

// What a cluster gives to the next one, in global memory; half by half of V's columns.
struct HandedState {
    float state[2 * kChainColumns][kHeadDim];  // in the chain's units
    Quad32 memory[2][kChainThreads];           // ChainMemory, and the state's exponent
    u64 flag[2][kChainThreads / 32];           // of each warp's part
};
static_assert(sizeof(HandedState) == 69696, "keep kda_jit/backends/cuda.py in step");

// Where the chain of a piece begins and ends. The state comes from the cluster before, and goes to the one after, where first is not the first
// one's, and last not the last one's.
struct PieceOfSequence {
    const FusedArgs& args;
    u32 rank;
    const Piece& piece;

    KDA_DEVICE Sequence sequence(const KdaArgs&, int) const { return piece.seq; }
    KDA_DEVICE int begin() const { return piece.first; }
    KDA_DEVICE int end(const Sequence&) const { return piece.last; }
    KDA_DEVICE HandedState& handed(u32 cluster) const { return reinterpret_cast<HandedState*>(args.kda.workspace)[cluster]; }
    KDA_DEVICE i64 element(int warp) const { return (rank * kChainColumns + warp * kVRows) * kHeadDim; }

    KDA_DEVICE void take(StateTile& state, ChainMemory& memory, int warp) const {
        HandedState& from = handed((blockIdx.x >> 1) - 1);
        u64* flag = &from.flag[rank][warp];
        while (__any_sync(0xffffffffu, load_acquire(flag) != args.call)) {}
        load_state(state, from.state, element(warp), false);
        const Quad32 x = load_quad(&from.memory[rank][threadIdx.x % kChainThreads]);
        memory = {__uint_as_float(x.x), static_cast<int>(x.y), __any_sync(0xffffffffu, x.z) != 0};
        state.exponent = static_cast<int>(x.w);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) store_relaxed(flag, 0ull);  // a graph's next replay has the same number
    }
    KDA_DEVICE void give(StateTile state, const ChainMemory& memory, int warp) const {
        HandedState& to = handed(blockIdx.x >> 1);
        store_global_quad(&to.memory[rank][threadIdx.x % kChainThreads],
                          Quad32{__float_as_uint(memory.bound), static_cast<u32>(memory.units), static_cast<u32>(memory.shifted), static_cast<u32>(state.exponent)});
        state.exponent = 0;
        store_state(state, to.state, element(warp), false);
        __threadfence();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) store_release(&to.flag[rank][warp], args.call);
    }
};

// Goes round the announced pieces; by whole warps.
struct PieceRound {
    FusedSmem& smem;
    u32 number = 0;

    KDA_DEVICE PieceRound(FusedSmem& smem) : smem(smem) {}
    KDA_DEVICE u32 full() const { return shared_address(smem.piece_barriers) + number % kPieces * static_cast<u32>(sizeof(Barriers)); }
    KDA_DEVICE u32 parity() const { return number / kPieces & 1; }
    KDA_DEVICE void announce(const Piece& piece) {
        mbarrier_wait(empty_of(full()), parity() ^ 1);
        __syncwarp();  // what follows lets that barrier go on: no lane may still be asking
        if ((threadIdx.x & 31) == 0) {
            smem.pieces[number % kPieces] = piece;
            mbarrier_arrive(full());
        }
        __syncwarp();
        ++number;
    }
    KDA_DEVICE Piece take() {
        mbarrier_wait(full(), parity());
        const Piece& found = smem.pieces[number % kPieces];
        const Piece piece{uniform(found.n), uniform(found.hv), uniform(found.first), uniform(found.last), found.seq};
        __syncwarp();  // read by all
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(empty_of(full()));
        __syncwarp();
        ++number;
        return piece;
    }
};

// By each warp that works on them. The vote: for the compiler, which otherwise does not see that a chain is uniform.
template <typename Work>
KDA_DEVICE void for_each_piece(FusedSmem& smem, Work work) {
    PieceRound pieces(smem);
#pragma unroll 1
    for (Piece piece = pieces.take(); __any_sync(0xffffffffu, piece.n >= 0); piece = pieces.take()) work(piece);
}

// Shares are of sequences in order, without a gap before the first; whatever else cu_seqlens says is done unit by unit. By one warp.
KDA_DEVICE bool in_order(const KdaArgs& args) {
    constexpr int kStep = 31;  // a lane compares its sequence's start with the next lane's
    const int lane = threadIdx.x & 31;
    bool yes = true;
#pragma unroll 1
    for (int n = 0; n < args.N; n += kStep) {
        const int own = min(n + lane, args.N), start = static_cast<int>(sequence_start(args, own));  // below 2^31: more tokens fit no GPU
        const int next = __shfl_sync(0xffffffffu, start, min(lane + 1, 31));
        yes &= start <= next && (own > 0 || start < kChunk);
    }
    return __all_sync(0xffffffffu, yes);
}

// Finds a cluster's pieces, one after another, and tells all who work on them; by one warp, ahead of them.
KDA_DEVICE void find_pieces(const FusedArgs& args, FusedSmem& smem) {
    const KdaArgs& kda = args.kda;
    const int cluster = static_cast<int>(blockIdx.x >> 1);
    PieceRound pieces(smem);
    if (args.share == 0 || !in_order(kda)) {
        const i64 units = static_cast<i64>(kda.N) * kda.HV;
#pragma unroll 1
        for (i64 unit = cluster; unit < units; unit += gridDim.x >> 1) {
            const int n = static_cast<int>(unit) / kda.HV, hv = static_cast<int>(unit) - n * kda.HV;
            const Sequence seq = load_sequence(kda, n);
            pieces.announce(Piece{n, hv, 0, seq.num_chunks, seq});
        }
    } else {  // whoever planned the shares saw to it that all slots can be counted in 32 bits
        const int share = static_cast<int>(args.share), change = static_cast<int>(args.change);
        const auto base_of = [&](int n, i64 start) { return static_cast<int>(slot_base(kda, n, start)) + n * change; };
        const int all = base_of(kda.N, sequence_start(kda, kda.N)) * kda.HV, stop = min(cluster * share, all);
#pragma unroll 1
        for (int at = min(stop + share, all); __any_sync(0xffffffffu, at > stop);) {  // the end of the slots that are left
            const int n = sequence_of_slot(kda, static_cast<u32>(at - 1) / static_cast<u32>(kda.HV), change);
            const Sequence seq = load_sequence(kda, n);
            const i64 start = seq.batch * kda.T + seq.first;
            const int base = base_of(n, start), slots = base_of(n + 1, start + seq.length) - base;
            const int hv = static_cast<int>(static_cast<u32>(at - 1 - base * kda.HV) / static_cast<u32>(slots));
            const int unit = base * kda.HV + hv * slots, first = max(unit, stop) - unit, last = at - unit;
            at = unit + first;
            if (__any_sync(0xffffffffu, first == 0 || first < seq.num_chunks))  // else slots without a chunk
                pieces.announce(Piece{n, hv, first, min(last, seq.num_chunks), seq});
        }
    }
    pieces.announce(Piece{-1, 0, 0, 0, Sequence{}});
}

// The chain's view: images from both CTAs in turn, tiles of its own. Image j of the peer lies there where image j of this CTA lies here.
struct FusedStages {
    static constexpr bool kBusy = true;
    FusedSmem& smem;
    u32 rank;
    u32 maker = 0;   // rank of the CTA that the next image is from
    SlotRound slot;  // where it made it
    Round<kReceived, sizeof(Slot)> received;
    TileRound tiles;

    KDA_DEVICE FusedStages(FusedSmem& smem, u32 rank) : smem(smem), rank(rank) {}
    struct Spot {
        u32 image, tile;
        u32 full;   // of the tile
        u32 freed;  // where the image was made; a cluster's address
    };
    KDA_DEVICE bool own() const { return maker == rank; }
    KDA_DEVICE Spot spot() const {
        const u32 made = slot.of(smem.own);
        return {own() ? made : received.of(smem.received), tiles.of(smem.tile), tiles.full(smem), peer_address(made + kFreed, maker)};
    }
    KDA_DEVICE void advance() {
        maker ^= 1;
        if (maker == 0) slot.advance(), received.advance();
        tiles.advance();
    }
    KDA_DEVICE u32 image_parity() const { return own() ? slot.parity : received.parity; }
    KDA_DEVICE bool landed(const Spot& spot) const {
        return mbarrier_test(spot.image + kReady, image_parity()) & mbarrier_test(spot.full, tiles.parity);  // both asked at once
    }
    KDA_DEVICE void wait(const Spot& spot) const {
        mbarrier_wait(spot.image + kReady, image_parity());
        mbarrier_wait(spot.full, tiles.parity);
    }
    KDA_DEVICE void release(const Spot& spot) const {
        mbarrier_arrive(empty_of(spot.full));
        peer_mbarrier_arrive(spot.freed);
    }
};

// Brings V's columns to the tiles, and takes O out of them; by one warp. As far ahead as there are tiles, whatever pieces they are of.
KDA_DEVICE void move_tiles(const FusedArgs& args, FusedSmem& smem, u32 rank) {
    constexpr int kAtOnce = 2;
    const KdaArgs& kda = args.kda;
    TileRound tiles;
    int under_way = 0;
    const auto empty = [&] {
        mbarrier_wait(empty_of(tiles.full(smem)), tiles.parity ^ 1);
        const TileOutput to = smem.outputs[tiles.index];
        if (to.valid == kChunk) {
            if (elect_one()) {
                async_proxy_fence();
                tensor_store(tiles.of(smem.tile), args.out, to.column, static_cast<int>(to.token), to.row);
                bulk_store_commit();
                bulk_store_wait_read<0>();
            }
        } else {
            u16* out = kda.out + to.row * kda.out_batch + to.token * kda.out_token + to.column + first_row(kda.out_token);
            store_columns<kAtOnce>(tiles.of(smem.tile), out, kda.out_token, to.valid);
            async_proxy_fence();
        }
        __syncwarp();  // one thread's copy refills all of it
    };
    for_each_piece(smem, [&](const Piece& piece) {
        const Sequence& seq = piece.seq;
        const int column = piece.hv * kHeadDim + static_cast<int>(rank) * kChainColumns;
#pragma unroll 1
        for (int c = piece.first; c < piece.last; ++c, tiles.advance()) {
            if (under_way == kTiles)
                empty();
            else
                ++under_way;
            const Chunk chunk = chunk_of(seq, c);
            const i64 token = seq.first + chunk.start;
            const u32 tile = tiles.of(smem.tile), full = tiles.full(smem);
            if (elect_one()) smem.outputs[tiles.index] = TileOutput{token, static_cast<int>(seq.batch), column, chunk.valid};
            if (chunk.valid == kChunk) {
                if (elect_one()) {
                    mbarrier_arrive_expect_bytes(full, kChainTile);
                    tensor_copy(tile, args.v, column, static_cast<int>(token), static_cast<int>(seq.batch), full);
                }
                __syncwarp();
            } else {
                const u16* v = kda.v + seq.batch * kda.v_batch + token * kda.v_token + column + first_row(kda.v_token);
                fetch_columns<kAtOnce>(tile, v, kda.v_token, chunk.valid, kda.v);
                cp_async_wait_all();
                __syncwarp();
                if (elect_one()) mbarrier_arrive(full);
            }
        }
    });
#pragma unroll 1
    for (int left = kTiles; left > 0; --left, tiles.advance())  // from the oldest on
        if (left <= under_way) empty();
}

// Loads this CTA's chunks, by one warp.
KDA_DEVICE void load_chunks(const FusedArgs& args, FusedSmem& smem, u32 rank) {
    const KdaArgs& kda = args.kda;
    SlotRound slot;
    const auto begin = [&] {
        mbarrier_wait(slot.of(smem.own) + kFreed, slot.parity ^ 1);
        return smem.own[slot.index].image;
    };
    u32 number = 0;  // of a piece's first chunk among the cluster's
    for_each_piece(smem, [&](const Piece& piece) {
        const Sequence& seq = piece.seq;
        int c = piece.first + ((number ^ rank) & 1);
        number += piece.last - piece.first;
        const ChunkInputs first = locate_inputs(kda, seq.batch, seq.first, 1, piece.hv);
        const int h = kda.HV == kda.H ? piece.hv : piece.hv / (kda.HV / kda.H);
        // Begins to load chunk c to the next slot.
        u8* image;
        Chunk chunk;
        u16 beta;
        const auto ask = [&] {
            chunk = chunk_of(seq, c);
            beta = read_beta(inputs_from(first, chunk.start, chunk.valid));
            image = begin();
            const u32 to = slot.of(smem.own), landed = to + kLanded;
            if (elect_one()) {  // whole tiles: a quad clears what came from past the sequence's end
                mbarrier_expect_bytes(landed, 6 * kHalfTile);
                const int token = static_cast<int>(seq.first) + chunk.start, row = static_cast<int>(seq.batch);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    tensor_copy(to + kRawK + half * kHalfStride, args.k, kHeadDim * h + 64 * half, token, row, landed);
                    tensor_copy(to + kRawQ + half * kHalfStride, args.q, kHeadDim * h + 64 * half, token, row, landed);
                    tensor_copy(to + kRawG + half * kHalfStride, args.g, kHeadDim * piece.hv + 64 * half, token, row, landed);
                }
            }
            __syncwarp();
        };
        const bool has_chunks = c < piece.last;
        if (has_chunks) ask();
        // Behind the first copies, which are waited for first; ptxas would put arithmetic with scalars, and so the wait for them, ahead of the copies.
        if (piece.first == 0) prefetch_state(kda, piece.n, piece.hv, rank * kChainColumns, kChainColumns);
        if (!has_chunks) return;
        ChunkScalars scalars[2] = {read_scalars(kda, first, piece.hv, 0), read_scalars(kda, first, piece.hv, 1)};
#pragma unroll 1
        while (true) {
            scalars[0].beta = beta;
            write_scalars(image, scalars[0], chunk.valid, 0);
            write_scalars(image, scalars[1], chunk.valid, 1);
            __syncwarp();
            if (elect_one()) mbarrier_arrive(slot.of(smem.own) + kLanded);
            slot.advance();
            c += 2;
            if (c >= piece.last) break;
            ask();
        }
    });
    for (int end = 0; end < kQuads; ++end) {  // every quad is to find one
        u8* image = begin();
        if (elect_one()) {
            *reinterpret_cast<i32*>(image + kValid) = 0;
            mbarrier_arrive(slot.of(smem.own) + kLanded);
        }
        __syncwarp();
        slot.advance();
    }
}

// Sends this CTA's images to the peer, by one warp, so that no quad waits for a place there.
KDA_DEVICE void send_images(FusedSmem& smem, u32 rank) {
    u32 cluster_number = 0, number = 0;  // of chunks, the cluster's and this CTA's
    for_each_piece(smem, [&](const Piece& piece) {
        const int chunks = piece.last - piece.first;
        int own = (chunks + 1 - static_cast<int>((cluster_number ^ rank) & 1)) / 2;
        cluster_number += chunks;
#pragma unroll 1
        for (; own > 0; --own, ++number) {
            const u32 at = shared_address(&smem.own[number % kSlots]), to = shared_address(&smem.received[number % kReceived]);
            const u32 arrived = peer_address(to + kReady, rank ^ 1);
            if (number >= kReceived) {
                // Both chains have done with the chunk whose place at the peer this one takes. (The phase after that one needs the copy below.)
                const u32 last = (number - kReceived) % kSlots, round = (number - kReceived) / kSlots;
                mbarrier_wait(shared_address(&smem.own[last].freed), round & 1);
            }
            // elect_one waits until no lane asks any more, as announce does.
            if (elect_one()) peer_mbarrier_arrive_expect_bytes(arrived, kStageBytes);
            mbarrier_wait(at + kReady, number / kSlots & 1);
            if (elect_one()) bulk_copy_to_peer(peer_address(to, rank ^ 1), at, kStageBytes, arrived);
            __syncwarp();
        }
    });
}

// Prepares every kQuads-th of this CTA's chunks.
KDA_DEVICE void prepare_chunks(const KdaArgs& args, FusedSmem& smem, int quad, Quarter part) {
    const bool leader = (threadIdx.x & 31) == 0;
#pragma unroll 1
    for (u32 number = quad;; number += kQuads) {  // among this CTA's chunks
        const u32 parity = number / kSlots & 1;
        u8* image = smem.own[number % kSlots].image;
        const u32 at = shared_address(image);
        // Not landed's phase alone: bytes come in no order, and a parity does not tell this chunk's phase from the one before the slot's last.
        mbarrier_wait(at + kFreed, parity ^ 1);
        mbarrier_wait(at + kLanded, parity);
        const i32 valid = *reinterpret_cast<const i32*>(image + kValid);
        if (valid == 0) return;
        if (valid < kChunk) clear_rows(image, part, valid);
        const PrepareBarriers barriers{1 + 2 * quad};
        measure_rows(image, part);
        barriers.all();
        prepare_chunk(args.lower_bound, image, smem.scratch[quad], part, barriers, [] {}, [] {});
        __syncwarp();
        if (leader) mbarrier_arrive(at + kReady);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) kda_fused(const __grid_constant__ FusedArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    FusedSmem& smem = *reinterpret_cast<FusedSmem*>(dynamic_smem);
    const u32 rank = cluster_rank();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) {
            Slot& slot = smem.own[i];
            mbarrier_init(shared_address(&slot.ready), 4);    // the quad's warps
            mbarrier_init(shared_address(&slot.freed), 8);    // the chains' warps
            mbarrier_init(shared_address(&slot.landed), 1);   // the loader, and bytes
        }
        for (int i = 0; i < kReceived; ++i) mbarrier_init(shared_address(&smem.received[i].ready), 1);
        for (int i = 0; i < kTiles; ++i) {
            mbarrier_init(shared_address(&smem.tile_barriers[i].full), 1);
            mbarrier_init(shared_address(&smem.tile_barriers[i].empty), kChainThreads / 32);
        }
        for (int i = 0; i < kPieces; ++i) {
            mbarrier_init(shared_address(&smem.piece_barriers[i].full), 1);
            mbarrier_init(shared_address(&smem.piece_barriers[i].empty), kChainThreads / 32 + 3);  // and loader, mover and sender
        }
        mbarrier_init_fence();
        if (args.kda.T > 0)  // else there are none
            prefetch_tensor_map(args.k), prefetch_tensor_map(args.q), prefetch_tensor_map(args.g), prefetch_tensor_map(args.v), prefetch_tensor_map(args.out);
    }
    __syncthreads();
    cluster_meet();
    if (warp < 4) {  // 128 x 192 + 384 x 80 + 128 x 48 registers, of 640 x 96
        raise_registers<192>();
        FusedStages stages(smem, rank);
        for_each_piece(smem, [&](const Piece& piece) {
            const ChainUnit unit{piece.n, piece.hv, static_cast<int>(rank)};
            compute_chain(args.kda, unit, PieceOfSequence{args, rank, piece}, stages);
        });
    } else if (warp < 4 + 4 * kQuads) {
        lower_registers<80>();
        const int quad = warp / 4 - 1, role = (warp + quad) % 4;  // each role on another of the SM's four parts
        prepare_chunks(args.kda, smem, quad, Quarter{role % 2, role / 2});
    } else {
        lower_registers<48>();
        if (warp == 4 + 4 * kQuads) {
            load_chunks(args, smem, rank);
        } else if (warp == 5 + 4 * kQuads) {
            move_tiles(args, smem, rank);
        } else if (warp == 6 + 4 * kQuads) {
            find_pieces(args, smem);
        } else {
            send_images(smem, rank);
        }
    }
    __syncwarp();
    cluster_sync();  // the peer may still arrive at barriers here
}
