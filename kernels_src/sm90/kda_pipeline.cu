// KDA prefill for Hopper, one persistent kernel: producer SMs prepare chunks, consumer SMs run the recurrence, and the stage
// images between them stay in L2.
//
//   S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t
//
// in      KdaArgs (common/kda_args.cuh), PipelineArgs
// out     out bf16; final_state; checkpoint_state
// launch  kda_pipeline_begin  1 CTA: zeroes the flags
//         kda_pipeline        grid = SMs, 384 threads, kPipelineSmem; after it, on the same stream
// roles   a ticket decides: producer CTAs prepare three chunks at a time, four warps each, and load the next ones meanwhile; consumer
//         CTAs run up to two chains, a warpgroup that computes and a warp that moves V and O each, a warp for the images, and registers
//         from these to the former
// order   lane = (group of sequences, head): its chunks run one after another, in two chains (halves of V); lanes run
//         beside each other. Producers take chunks of all lanes in turn: chunk 0 of every lane, chunk 1, ...
// ring    each lane has `ring` stage images; a producer writes the image of chunk i when both chains are past chunk i - ring
#include "common/kda_args.cuh"
#include "common/prepare.cuh"
#include "common/sequence.cuh"
#include "sm90/chain.cuh"

struct PipelineArgs {
    KdaArgs kda;     // kda.workspace: the ring, [lanes][ring] images
    u32* flags;        // see below
    i32 groups;        // of sequences, about equal in tokens
    i32 heads_beside;  // heads of a group that run beside each other; the others follow in the same lanes
    i32 ring;          // images a lane
    i32 consumers;     // CTAs
    i32 chains_per_cta;  // 2: both halves of a lane, which share its images; 1: one
    i32 reserved;
};
static_assert(sizeof(PipelineArgs) == sizeof(KdaArgs) + 32, "keep kda_jit/backends/cuda.py in step");

// Flags, zero on entry: the ticket, alone on its line; for each lane a line with the number of images that its two chains
// have taken; for each lane and place of its ring, number + 1 of the image written there.
constexpr int kLineWords = 32;
KDA_DEVICE u32* consumed_counters(const PipelineArgs& args, int lane) { return args.flags + kLineWords * (1 + lane); }
KDA_DEVICE u32* ready_flag(const PipelineArgs& args, int lane, int place) {
    return args.flags + kLineWords * (1 + args.groups * args.heads_beside) + lane * args.ring + place;
}

// A group of sequences: those that begin within its share of the tokens.
struct Group {
    int first, last;  // sequences [first, last)
    i64 base;         // their first chunk slot
    int slots;        // of one head
};
// First sequence whose start is at or past `token`; by the whole warp.
KDA_DEVICE int sequence_at_or_after(const KdaArgs& args, i64 token) {
    int low = 0, high = args.N;  // the answer is in [low, high]
    const int lane = threadIdx.x & 31;
    while (low < high) {
        const int step = (high - low + 31) / 32;
        const int n = low + lane * step;
        const bool before = n < high && sequence_start(args, n) < token;
        const int count = __popc(__ballot_sync(0xffffffffu, before));
        if (count == 0) return low;
        low += (count - 1) * step + 1;
        high = min(high, low + step - 1);
    }
    return low;
}
KDA_DEVICE Group load_group(const PipelineArgs& args, int group) {
    const KdaArgs& kda = args.kda;
    const i64 tokens = sequence_start(kda, kda.N);
    Group g;
    g.first = group == 0 ? 0 : sequence_at_or_after(kda, (tokens * group + args.groups - 1) / args.groups);
    g.last = group + 1 == args.groups ? kda.N : sequence_at_or_after(kda, (tokens * (group + 1) + args.groups - 1) / args.groups);
    g.base = slot_base(kda, g.first);
    g.slots = static_cast<int>(slot_base(kda, g.last) - g.base);
    return g;
}

constexpr int kThreads = 384;          // at 168 registers
constexpr int kQuads = kThreads / kPrepareThreads;  // of warps: chunks that a producer CTA works on at a time
constexpr int kChains = 2;             // of a consumer CTA
constexpr int kMaxGroups = 64;
constexpr int kPipelineSmem = 217088;  // for one CTA an SM, whatever its role

// One chunk of one value head, as the producers need to know it.
struct Job {
    ChunkInputs in;
    u8* image;
    const u32* consumed;  // of the lane's two chains
    u32* ready;
    i32 needed;           // images both chains must have taken before this one may be written
    i32 number;           // in its lane
    i32 hv;
    i32 exists;
};

// Goes through the chunks of all lanes in turn, every `step`-th: chunk 0 of each lane, chunk 1, ... By one warp.
struct JobList {
    int number, lane;             // of the next candidate
    int step_numbers, step_lanes; // to the one after it
    int lanes, heads_deep, most;  // most: chunk slots of the longest lane
    Sequence seq;                 // that the last job was found in, which is most often the next one's too,
    i64 seq_base, seq_end;        // and its chunk slots

    JobList() = default;
    KDA_DEVICE JobList(const PipelineArgs& args, const Group* groups, int first, int step) {
        lanes = args.groups * args.heads_beside;
        heads_deep = (args.kda.HV + args.heads_beside - 1) / args.heads_beside;
        most = 0;
        for (int g = 0; g < args.groups; ++g) most = max(most, groups[g].slots);
        most *= heads_deep;
        number = first / lanes, lane = first % lanes;
        step_numbers = step / lanes, step_lanes = step % lanes;
        seq_base = seq_end = 0;
    }
    KDA_DEVICE void advance() {
        number += step_numbers, lane += step_lanes;
        if (lane >= lanes) lane -= lanes, ++number;
    }
    // Writes the next job that exists; the gaps between sequences and the ends of short lanes do not.
    KDA_DEVICE void next(const PipelineArgs& args, const Group* groups, Job& job) {
        const KdaArgs& kda = args.kda;
        const int thread = threadIdx.x & 31;
        for (; number < most; advance()) {
            const int of_group = args.groups == 1 ? lane : lane % args.heads_beside;
            const Group& group = groups[args.groups == 1 ? 0 : lane / args.heads_beside];
            if (number >= group.slots * heads_deep) continue;
            const int deep = heads_deep == 1 ? 0 : number / group.slots;
            const int hv = of_group + deep * args.heads_beside;
            if (hv >= kda.HV) continue;
            const i64 slot = group.base + (number - deep * group.slots);
            if (slot < seq_base || slot >= seq_end) {
                const int n = sequence_of_slot(kda, slot);
                seq = load_sequence(kda, n);
                seq_base = slot_base(kda, n), seq_end = slot_base(kda, n + 1);
            }
            const int c = static_cast<int>(slot - seq_base);
            if (c >= seq.num_chunks) continue;

            const Chunk chunk = chunk_of(seq, c);
            const ChunkInputs in = locate_inputs(kda, seq.batch, seq.first + chunk.start, chunk.valid, hv);
            if (thread == 0) {
                const int place = number % args.ring;
                job.in = in;
                job.image = kda.workspace + (static_cast<i64>(lane) * args.ring + place) * kStageBytes;
                job.consumed = consumed_counters(args, lane);
                job.ready = ready_flag(args, lane, place);
                job.needed = number - args.ring + 1;
                job.number = number;
                job.hv = hv;
                job.exists = 1;
            }
#pragma unroll
            for (int part = 0; part < 4; ++part) prefetch_inputs(in, Quarter{part & 1, part >> 1});
            advance();
            return;
        }
        if (thread == 0) job.exists = 0;
    }
};

struct QuadSmem {
    struct alignas(128) Image {
        u8 bytes[kStageBytes];
    };
    Image image[2];  // this job's and, being stored and then loaded, the one before's and the next's
    PrepareScratch scratch;
};
struct ProducerSmem {
    QuadSmem quad[kQuads];
    Job jobs[kQuads][3];   // the one before, this one, the next, in turn
    JobList list[kQuads];  // here, since no warp has registers to spare
    Group groups[kMaxGroups];
};

KDA_DEVICE void find_job(const PipelineArgs& args, ProducerSmem& smem, int quad, Job& job) {
    JobList list = smem.list[quad];
    list.next(args, smem.groups, job);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) smem.list[quad] = list;
    __syncwarp();
}

KDA_DEVICE void produce(const PipelineArgs& args, ProducerSmem& smem, int producer, int producers) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), quad = warp / 4;
    const int role = (warp + quad) % 4;  // each on another of the SM's four parts
    const Quarter part{role % 2, role / 2};
    const bool leader = (threadIdx.x & 31) == 0, spare_warp = part.half == 1 && part.block == 0;
    for (int g = warp; g < args.groups; g += kThreads / 32) {
        const Group group = load_group(args, g);
        if (leader) smem.groups[g] = group;
    }
    __syncthreads();
    const PrepareBarriers barriers{1 + 2 * quad};
    if (spare_warp) {
        // Neighbouring heads of a chunk go to different SMs.
        smem.list[quad] = JobList(args, smem.groups, quad * producers + producer, kQuads * producers);
        __syncwarp();
        find_job(args, smem, quad, smem.jobs[quad][0]);
    }
    barriers.all();
    QuadSmem& own = smem.quad[quad];
    int turn = 0, side = 0;  // of the jobs, of the images
    // Warp (1, 0) stores images, and says that one is there a job later, when it surely is; of the first one, which consumers wait for, at once.
    bool owes = false, first = true;  // saying so; image
    const auto publish = [&](const Job& job) {
        if (leader) store_release(job.ready, job.number + 1);
        __syncwarp();
        owes = false;
    };
    const auto before = [&]() -> const Job& { return smem.jobs[quad][turn == 0 ? 2 : turn - 1]; };
    const auto spare = [&] {
        const Job& job = smem.jobs[quad][turn];
        const u32* taken = job.consumed + (threadIdx.x & 1);
        while (__any_sync(0xffffffffu, static_cast<i32>(load_relaxed(taken)) < job.needed)) {
            if (!owes) continue;
            bulk_store_wait<0>();  // whoever this waits for may wait for that image
            publish(before());
        }
        find_job(args, smem, quad, smem.jobs[quad][turn == 2 ? 0 : turn + 1]);
        bulk_store_wait_read<0>();  // the other image may be loaded to
        __syncwarp();
    };
    const auto solved = [&] {
        const Job& next = smem.jobs[quad][turn == 2 ? 0 : turn + 1];
        if (next.exists) fetch_quarter(own.image[side ^ 1].bytes, next.in, part);
    };
    if (smem.jobs[quad][0].exists) fetch_quarter(own.image[0].bytes, smem.jobs[quad][0].in, part);
    for (; smem.jobs[quad][turn].exists; turn = turn == 2 ? 0 : turn + 1, side ^= 1) {
        const Job& job = smem.jobs[quad][turn];
        u8* image = own.image[side].bytes;
        finish_quarter(args.kda, job.in, job.hv, image, part);
        barriers.all();
        prepare_chunk(args.kda.lower_bound, image, own.scratch, part, barriers, spare, solved);
        barriers.all();  // the image is complete
        if (spare_warp) {
            if (elect_one()) {
                bulk_store(job.image, shared_address(image), kStageBytes);
                bulk_store_commit();
            }
            if (owes) {
                bulk_store_wait<1>();  // all but this image
                publish(before());
            }
            owes = true;
            if (first) {
                bulk_store_wait<0>();
                publish(job);
                first = false;
            }
        }
    }
    if (owes) {
        bulk_store_wait<0>();
        publish(before());
    }
}

// Images from the ring of a lane, one sequence at a time; asked by the image mover, in order.
struct RingSource {
    const u8* ring;     // the lane's images
    const u32* ready;   // and their flags
    u32* taken;         // this chain's counter
    int size;           // of the ring
    int base;           // number, in the lane, of the sequence's first chunk
    mutable int next;   // number of the image that is asked for next,
    mutable int place;  // and where in the ring it is
    mutable int known;  // images before this number are known to be ready
    static constexpr bool kReused = true;

    // On to the sequence whose first chunk has this number; numbers in between hold no chunk and count as taken.
    KDA_DEVICE void begin(int number) {
        place = (place + (number - next)) % size;
        base = next = number;
        known = max(known, number);
        skip_to(number);
    }
    KDA_DEVICE void wait(int) const {
        // Several flags a look, since a look takes longer than most waits: lane i asks for the i-th image from here.
        const int lane = threadIdx.x & 31;
        while (next >= known) {
            const bool asks = lane < 8 && lane < size;
            const int at = place + lane;
            const u32 flag = asks ? load_acquire(ready + (at < size ? at : at - size)) : 0;
            const u32 written = __ballot_sync(0xffffffffu, asks && flag == static_cast<u32>(next + lane + 1));
            known = max(known, next + __ffs(~written) - 1);
        }
        __syncwarp();
        global_async_proxy_fence();  // what lies behind the flags is read by bulk copies
    }
    KDA_DEVICE const u8* image(int) const {
        const u8* at = ring + static_cast<i64>(place) * kStageBytes;
        ++next;
        place = place + 1 == size ? 0 : place + 1;
        return at;
    }
    KDA_DEVICE void consumed(int c) const { skip_to(base + c + 1); }
    KDA_DEVICE void skip_to(int number) const {
        // Relaxed: what was read from the ring is in shared memory by now, and nothing that was written is handed over. A
        // release would wait for the output's stores.
        if ((threadIdx.x & 31) == 0) store_relaxed(taken, number);
    }
};

constexpr int kStages = 6;
struct ConsumerSmem {
    ChainSmem<kStages> chains;
    Group group;  // here, since a warpgroup that computes has no register to spare
};
static_assert(sizeof(ConsumerSmem) <= kPipelineSmem && sizeof(ProducerSmem) <= kPipelineSmem, "the shared memory asked for");

// What a consumer CTA works on: a lane, both halves of V or one.
struct ConsumerRole {
    int lane, half;
    bool works;
};
KDA_DEVICE ConsumerRole consumer_role(const PipelineArgs& args, int consumer) {
    const int chain = consumer * args.chains_per_cta, lane = chain >> 1;
    return ConsumerRole{lane, chain & 1, lane < args.groups * args.heads_beside};
}

// Warpgroup i computes chain i,
KDA_DEVICE void compute(const PipelineArgs& args, ConsumerSmem& smem, const ConsumerRole& role) {
    const int place = uniform(threadIdx.x / 128);
    if (place >= args.chains_per_cta) return;
    ChainStages<kStages> stages(smem.chains, place);
    const int first = uniform(smem.group.first), last = uniform(smem.group.last);
    for (int hv = role.lane % args.heads_beside; hv < args.kda.HV; hv += args.heads_beside) {
        for (int n = first; n < last; ++n)
            compute_chain(args.kda, ChainUnit{n, hv, role.half + place}, WholeSequence{}, stages);
    }
}
// the i-th warp after the warpgroups moves its columns,
KDA_DEVICE void move(const PipelineArgs& args, ConsumerSmem& smem, const ConsumerRole& role, int place) {
    ChainStages<kStages> stages(smem.chains, place);
    for (int hv = role.lane % args.heads_beside; hv < args.kda.HV; hv += args.heads_beside) {
        for (int n = smem.group.first; n < smem.group.last; ++n)
            move_columns(args.kda, ChainUnit{n, hv, role.half + place}, stages);
    }
}
// and the one after those the images.
KDA_DEVICE void move_images(const PipelineArgs& args, ConsumerSmem& smem, const ConsumerRole& role) {
    const KdaArgs& kda = args.kda;
    const Group& group = smem.group;
    ChainStages<kStages> stages(smem.chains, 0);
    RingSource source{kda.workspace + static_cast<i64>(role.lane) * args.ring * kStageBytes, ready_flag(args, role.lane, 0),
                      consumed_counters(args, role.lane) + role.half, args.ring, 0, 0, 0, 0};
    // Two chains take their images together: the other counter holds nobody back.
    if (args.chains_per_cta == 2 && (threadIdx.x & 31) == 0) store_relaxed(source.taken + 1, 0x7fffffff);
    for (int hv = role.lane % args.heads_beside; hv < kda.HV; hv += args.heads_beside) {
        for (int n = group.first; n < group.last; ++n) {
            const int before = hv / args.heads_beside * group.slots;  // numbers of the heads that are done
            source.begin(before + static_cast<int>(slot_base(kda, n) - group.base));
            move_images(kda, ChainUnit{n, hv, 0}, source, stages);
        }
    }
    source.skip_to(0x7fffffff);
}

KDA_DEVICE void consume(const PipelineArgs& args, ConsumerSmem& smem, int consumer) {
    const ConsumerRole role = consumer_role(args, consumer);
    if (!role.works) return;
    if (threadIdx.x < 32) {
        const Group group = load_group(args, role.lane / args.heads_beside);
        if (threadIdx.x == 0) {
            smem.group = group;
            init_chains(smem.chains, args.chains_per_cta);
        }
    }
    __syncthreads();
    if (threadIdx.x < 128 * kChains) {  // 2 x 128 x 208 + 128 x 88 registers, of 384 x 168
        raise_registers<208>();
        compute(args, smem, role);
    } else {
        lower_registers<88>();
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - 4 * kChains;
        if (warp < args.chains_per_cta)
            move(args, smem, role, warp);
        else if (warp == kChains)
            move_images(args, smem, role);
    }
}

constexpr u32 kNoTicket = 0x40000000;

// Zeroes the flags; one CTA. Where a sequence ends before it begins, producers and consumers would not agree on the chunks there
// are, and wait for each other: then there are no tickets, and nothing is written.
extern "C" __global__ void __launch_bounds__(1024) kda_pipeline_begin(const __grid_constant__ PipelineArgs args) {
    grid_launch_dependents();
    const int lanes = args.groups * args.heads_beside;
    const int words = kLineWords * (1 + lanes) + lanes * args.ring;
    bool wrong = false;
    for (int n = threadIdx.x; n < args.kda.N; n += 1024) wrong |= sequence_start(args.kda, n + 1) < sequence_start(args.kda, n);
    wrong = __syncthreads_or(wrong);
    for (int i = threadIdx.x; i < words; i += 1024) args.flags[i] = i == 0 && wrong ? kNoTicket : 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) kda_pipeline(const __grid_constant__ PipelineArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    __shared__ int shared_ticket;
    grid_wait_for_prerequisites();  // the flags are zero
    if (threadIdx.x == 0) shared_ticket = atomicAdd(args.flags, 1);
    __syncthreads();
    // Consumers are spread evenly over the tickets, so that any set of CTAs that runs first has both roles.
    const int ticket = uniform(shared_ticket), total = gridDim.x;
    if (ticket >= total) return;
    // A division is done in ordinary registers; for a chain's products all that leads to it must be seen to be uniform.
    const int consumer = uniform(static_cast<int>(static_cast<i64>(ticket) * args.consumers / total));
    const bool is_consumer = uniform(static_cast<int>(static_cast<i64>(ticket + 1) * args.consumers / total)) > consumer;
    if (is_consumer) {
        consume(args, *reinterpret_cast<ConsumerSmem*>(dynamic_smem), consumer);
    } else {
        produce(args, *reinterpret_cast<ProducerSmem*>(dynamic_smem), ticket - consumer, total - args.consumers);
    }
}
