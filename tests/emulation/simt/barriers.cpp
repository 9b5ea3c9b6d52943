// Barriers of CTAs and clusters, mbarriers, and flags in global memory.
#include "machine.hpp"

#include <algorithm>
#include <cstring>

namespace simt {

namespace {

void join(Barrier& barrier, int all, Wait wait, u32 number, const void* where) {
    if (++barrier.arrived == all) {
        machine.release(barrier);
        machine.perhaps_yield();
    } else {
        barrier.waiting.push_back(&machine.lane());
        machine.block(wait, &barrier, number, where);
    }
}

Barrier& cta_barrier(int number, int threads, const void* where) {
    if (number < 0 || number >= kNumBarriers || threads % kWarpSize != 0) machine.fail("bar.sync with a number or a count that there is not");
    Barrier& barrier = machine.cta().barriers[number];
    machine.lane().where = where;
    if (barrier.arrived == 0) barrier.expected = threads;
    if (barrier.expected != threads) machine.fail("threads that come to one barrier expect different numbers of them");
    return barrier;
}

// The 64 bits of an mbarrier in shared memory, with a mark by which one that was never made, or was written over, shows.
struct MbarrierState {
    u32 phase, expected, missing;  // arrivals
    int bytes;                     // that are yet to come; below 0 where they came before they were announced
};
constexpr u64 kMark = 0xb5;
constexpr int kCountBits = 13, kBytesBits = 28;

class Mbarrier {
public:
    explicit Mbarrier(u32 address) : cta_(machine.cta_of(address)), memory_(machine.shared(address, 8, 8)) {}
    Mbarrier(Cta& cta, std::byte* memory) : cta_(cta), memory_(memory) {}
    const void* key() const { return memory_; }
    Cta& cta() const { return cta_; }

    MbarrierState load() const {
        u64 bits;
        std::memcpy(&bits, memory_, sizeof bits);
        if (bits >> 56 != kMark) machine.fail("what is taken for an mbarrier is none: not initialised, or written over");
        const u64 counts = (1u << kCountBits) - 1;
        MbarrierState s;
        s.phase = bits & 1;
        s.expected = bits >> 1 & counts;
        s.missing = bits >> (1 + kCountBits) & counts;
        s.bytes = static_cast<int>(bits >> (1 + 2 * kCountBits) << (32 - kBytesBits)) >> (32 - kBytesBits);
        return s;
    }
    void store(const MbarrierState& s) {
        const u64 bytes = static_cast<u32>(s.bytes) & ((1u << kBytesBits) - 1);
        const u64 bits = kMark << 56 | bytes << (1 + 2 * kCountBits) | static_cast<u64>(s.missing) << (1 + kCountBits) | s.expected << 1 | s.phase;
        std::memcpy(memory_, &bits, sizeof bits);
    }
    void update(u32 arrivals, int bytes) {
        MbarrierState s = load();
        if (arrivals > s.missing) machine.fail("more arrivals at an mbarrier than its phase expects");
        s.missing -= arrivals;
        s.bytes += bytes;
        const bool over = s.missing == 0 && s.bytes == 0;
        if (over) s.phase ^= 1, s.missing = s.expected;
        store(s);
        if (!over) return;
        auto& waits = cta_.mbarrier_waits;
        const auto rest = std::partition(waits.begin(), waits.end(), [&](const Lane* lane) { return lane->key != memory_; });
        std::for_each(rest, waits.end(), [](Lane* lane) { machine.wake(*lane); });
        waits.erase(rest, waits.end());
        machine.changed();
    }

private:
    Cta& cta_;
    std::byte* memory_;
};

}  // namespace

void sync_threads(int number, int threads) {
    Barrier& barrier = cta_barrier(number, threads, SIMT_HERE);
    join(barrier, threads != 0 ? threads : machine.cta().live, Wait::kBarrier, number, SIMT_HERE);
}
int sync_threads_count(bool vote) {
    Barrier& barrier = cta_barrier(0, 0, SIMT_HERE);
    barrier.votes += vote;
    join(barrier, machine.cta().live, Wait::kBarrier, 0, SIMT_HERE);
    return barrier.result;  // the next one is not over before all of these have read it
}
void sync_cluster() {
    Cluster& cluster = *machine.cta().cluster;
    join(cluster.barrier, cluster.lanes, Wait::kCluster, 0, SIMT_HERE);
}

void mbarrier_init(u32 address, u32 arrivals) { Mbarrier(address).store({0, arrivals, arrivals, 0}); }
void mbarrier_arrive(u32 address, u32 expected_bytes) {
    Mbarrier barrier(address);
    machine.lane().where = SIMT_HERE;
    // Announced first: else the arrival might end the phase.
    barrier.update(0, static_cast<int>(expected_bytes));
    barrier.update(1, 0);
    machine.perhaps_yield();
}
void mbarrier_expect(u32 address, u32 bytes) {
    Mbarrier barrier(address);
    machine.lane().where = SIMT_HERE;
    MbarrierState s = barrier.load();
    s.bytes += static_cast<int>(bytes);
    barrier.store(s);
}
void mbarrier_wait(u32 address, u32 parity) {
    const Mbarrier barrier(address);
    machine.lane().where = SIMT_HERE;
    // Looks again when woken, as a kernel does: who sleeps through two phases waits for a third.
    while (barrier.load().phase == (parity & 1)) {
        barrier.cta().mbarrier_waits.push_back(&machine.lane());
        machine.block(Wait::kMbarrier, barrier.key(), parity, SIMT_HERE);
    }
}
bool mbarrier_test(u32 address, u32 parity) {
    machine.lane().where = SIMT_HERE;
    return Mbarrier(address).load().phase != (parity & 1);
}

void complete_bytes(Cta& cta, std::byte* memory, u32 bytes) { Mbarrier(cta, memory).update(0, -static_cast<int>(bytes)); }
void complete_arrival(Cta& cta, std::byte* memory) { Mbarrier(cta, memory).update(1, 0); }

// -- flags in global memory --------------------------------------------------------------------------------------------------------------

namespace {

template <typename Word>
Word look(const Word* p, const void* where) {
    Lane& lane = machine.lane();
    machine.perhaps_yield();
    // Nothing has happened since it looked last: it may sleep until something does.
    if (lane.polled == p && lane.polled_at == machine.changes()) {
        machine.flag_waits.push_back(&lane);
        machine.block(Wait::kFlag, p, *p, where);
    }
    lane.polled = p;
    lane.polled_at = machine.changes();
    return *p;
}
template <typename Word>
void store(Word* p, Word value) {
    *p = value;
    machine.changed();
    machine.perhaps_yield();
}

}  // namespace

u32 poll(const u32* p) { return look(p, SIMT_HERE); }
u64 poll(const u64* p) { return look(p, SIMT_HERE); }
void publish(u32* p, u32 value) { store(p, value); }
void publish(u64* p, u64 value) { store(p, value); }
u32 atomic_add(u32* p, u32 value) {
    const u32 before = *p;
    *p = before + value;
    machine.changed();
    machine.perhaps_yield();
    return before;
}

}  // namespace simt
