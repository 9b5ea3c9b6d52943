// The machine: lanes in warps in CTAs in clusters in grids, who of them may run, and what is still on its way to memory.
//
// One OS thread runs one lane at a time, so that nothing is ever torn; what varies, by a seed, is which warp goes on at each place where
// several could, and when copies land. A style drawn from the seed says how: warps that change at every step or hardly ever, copies that
// land at once or as late as the waits allow.
#pragma once

#include "device.hpp"
#include "fiber.hpp"

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace simt {

constexpr int kWarpSize = 32;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kNumBarriers = 16;

struct Warp;
struct Cta;
struct Grid;

// What a lane waits for.
enum class Wait : unsigned char { kNothing, kWarp, kBarrier, kCluster, kMbarrier, kFlag, kGrid };

// 16 bytes of a cp.async; nowhere to read from: zeros.
struct LaneCopy {
    std::byte* to;
    const void* from;
    u32 group;
};

struct Lane : LaneIndex {
    Fiber fiber;
    std::byte* stack = nullptr;
    Warp* warp = nullptr;
    int index = 0;

    Wait wait = Wait::kNothing;
    const void* key = nullptr;    // the barrier or flag in memory
    u64 detail = 0;               // parity, the barrier's number, or what the flag was
    const void* where = nullptr;  // in the kernel's code

    const void* polled = nullptr; // the flag it looked at last,
    u64 polled_at = 0;            // and how many changes there had been

    std::deque<LaneCopy> copies;  // on their way
    u64 copies_landed = 0;
    u32 copy_group = 0, store_group = 0;  // those being filled
};

// Four accumulators of each lane, the eight columns of a product, while products that write them are in flight.
struct Tile {
    std::array<float*, kWarpSize> at;
    float value[kWarpSize][4];
    int pending;
};
struct Product {
    u64 operand;
    bool rows_of_b, accumulate, done;
    u32 group;
    float a[16][16];
    std::array<const u32*, kWarpSize> a_at;  // the registers that `a` was read from,
    u32 a_words[kWarpSize][4];               // and what was in them
    std::vector<Tile*> tiles;
};

// Operations of a whole warp, which all of its lanes come to.
enum class Together : unsigned char {
    kNone, kSync, kShuffle, kBallot, kOr, kMax, kLoad, kStore, kTranspose, kMma, kWgmma, kCommit, kWgmmaWait,
};

struct Warp {
    Cta* cta = nullptr;
    int index = 0;
    std::array<Lane, kWarpSize> lanes;
    u32 live = kAllLanes, runnable = kAllLanes;
    int next = 0, stride = 1;   // lanes go on in this order
    int ready_at = -1;          // in the machine's list
    bool yields = false;        // to another warp, once its lanes have all come as far as they can
    u32 priority = 0;

    Together together = Together::kNone;
    u32 arrived = 0;
    std::array<void*, kWarpSize> operands;

    std::deque<Product> products;
    u64 products_issued = 0;  // a digest of all, which a warpgroup's warps have in common
    std::vector<std::unique_ptr<Tile>> tiles;
    u32 wgmma_group = 0;
};

// Of a CTA (bar.sync), or of a cluster.
struct Barrier {
    int expected = 0, arrived = 0, votes = 0, result = 0;
    std::vector<Lane*> waiting;
};

struct Cluster {
    std::vector<Cta*> ctas;
    Barrier barrier;
    int lanes = 0;  // that have not ended
};

struct Cta {
    Grid* grid = nullptr;
    std::shared_ptr<Cluster> cluster;
    u32 rank = 0, number = 0;
    std::vector<std::unique_ptr<Warp>> warps;
    int live = 0;  // lanes
    bool triggered = false;
    std::array<Barrier, kNumBarriers> barriers;
    std::vector<Lane*> mbarrier_waits;

    // Shared memory: a kilobyte that the system keeps, the kernel's, variables with names, and bytes that nobody may write.
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, nullptr};
    u32 dynamic_bytes = 0, static_bytes = 0;
    std::vector<std::pair<const void*, u32>> statics;

    std::byte* at(u32 offset, u32 bytes, u32 alignment);
};

struct Launch {
    u32 ctas, block, smem;
    bool overlaps;  // may start before the grid ahead of it has ended
    bool together;  // all CTAs at once
};
struct Grid {
    const Entry* entry;
    Launch launch;
    std::unique_ptr<std::byte, void (*)(void*)> args{nullptr, nullptr};
    u32 next = 0, triggered = 0, ended = 0;
    std::vector<std::unique_ptr<Cta>> running;
};

// Something that has been asked for and happens at any later time.
struct Event {
    enum Kind { kLoad, kStoreRead, kStoreWrite, kArrival } kind;
    const Cta* of;        // the CTA whose shared memory it reads or writes, which must not end before,
    const Cta* and_of;    // and another one, or null
    const Lane* lane;     // that asked
    u32 group;
    std::function<void()> happen;
};

class Random {
public:
    explicit Random(u64 seed = 0) : state_(seed * 2 + 1) { next(), next(); }
    u32 next();
    u32 below(u32 n) { return static_cast<u32>((static_cast<u64>(next()) * n) >> 32); }
    bool one_in(u32 n) { return n != 0 && below(n) == 0; }  // 0: never

private:
    u64 state_;
};

// Each number is n of "one in n", 0: never.
struct Style {
    u32 switching;   // another warp at a place where this one could go on,
    u32 woken;       // the same where it has just done what others may have waited for
    u32 landing;     // a copy lands before a warp goes on
    u32 at_once;     // a copy lands where it is asked for
    u32 eager;       // a wgmma reads shared memory where it is asked for, not at the wait
    bool priorities; // the first of an order, rather than any;
    u32 reordering;  // whoever is the first gets another place in it
    u32 residents;   // CTAs at once, where any number will do
    // Whether a lane may fall behind its warp at any place. CUDA promises no more; on the hardware lanes that one phase of a barrier wakes
    // go on together, and none of them misses the next phase while another lane goes round.
    bool lanes_apart;
};

class Machine {
public:
    void enqueue(const Entry& entry, const Launch& launch, const void* args);
    // Runs what was enqueued. Empty, or what went wrong.
    std::string run(u64 seed, bool lanes_apart);

    Random random;
    Style style{};

    [[noreturn]] void fail(const std::string& words);
    Lane& lane() { return *static_cast<Lane*>(current); }
    Cta& cta() { return *lane().warp->cta; }

    // Until somebody wakes the lane.
    void block(Wait wait, const void* key, u64 detail, const void* where);
    void wake(Lane& lane);
    // A place where another warp may go on, and now does.
    void perhaps_yield();
    void yield();
    // Something that others may wait for has happened.
    void changed();
    u64 changes() const { return changes_; }
    std::vector<Lane*> flag_waits, grid_waits;

    void add(Event event);
    template <typename Predicate>
    void happen_all(Predicate predicate);
    bool before_all_ended(const Grid& grid) const { return grids_.front().get() != &grid; }

    // The memory behind a shared address, of this CTA or of a peer.
    std::byte* shared(u32 address, u32 bytes, u32 alignment);
    Cta& cta_of(u32 address);

    // The last lane to come does the work for all: work(warp), whose operands are those of the lanes.
    template <typename Work>
    void together(Together what, void* operands, const void* where, Work work);
    void release(Barrier& barrier);

private:
    friend void run_lane();
    void schedule();
    void admit();
    void start_cluster(Grid& grid);
    void end_ctas();
    void end_lane();
    void hand_over();
    void set_runnable(Warp& warp, u32 lanes);
    Warp& choose();
    void land_any();
    void draw_style(u64 seed, bool lanes_apart);
    void forget_all();
    std::string stuck();
    std::string describe(const Lane& lane);

    Fiber scheduler_;
    StackPool stacks_;
    std::deque<std::unique_ptr<Grid>> grids_;
    std::vector<Warp*> ready_;
    std::vector<Event> events_;
    std::vector<Cta*> ended_;
    std::string error_;
    bool failed_ = false;
    u64 changes_ = 0, changes_seen_ = 0;  // all, and at the last place where a warp could have been left
    u64 steps_ = 0;                       // since the last change
    u32 last_looks_ = 0;
};
extern Machine machine;
void run_lane();  // what a lane's fiber begins with

template <typename Predicate>
void Machine::happen_all(Predicate predicate) {
    for (std::size_t i = 0; i < events_.size();) {
        if (!predicate(events_[i])) {
            ++i;
            continue;
        }
        Event event = std::move(events_[i]);
        events_[i] = std::move(events_.back());
        events_.pop_back();
        event.happen();
        changed();
        i = 0;  // it may have asked for more
    }
}

template <typename Work>
void Machine::together(Together what, void* operands, const void* where, Work work) {
    Lane& lane = this->lane();
    Warp& warp = *lane.warp;
    if (warp.arrived != 0 && warp.together != what) {
        lane.where = where;
        fail("lanes of a warp are at different operations of the whole warp");
    }
    if (warp.live != kAllLanes) fail("an operation of the whole warp after some of its lanes have ended");
    warp.together = what;
    warp.operands[lane.index] = operands;
    warp.arrived |= 1u << lane.index;
    if (warp.arrived != kAllLanes) {
        block(Wait::kWarp, &warp, 0, where);
        return;
    }
    lane.where = where;
    if (warp.yields) yield();
    warp.arrived = 0;
    work(warp);
    for (Lane& other : warp.lanes) other.wait = Wait::kNothing;
    set_runnable(warp, kAllLanes);
    if (random.one_in(16)) warp.stride = static_cast<int>(random.below(16)) * 2 + 1;
    perhaps_yield();
}

std::string format(const char* words, ...) __attribute__((format(printf, 1, 2)));

// Where the kernel's code called what uses this.
#define SIMT_HERE __builtin_return_address(0)

}  // namespace simt
