// Lanes and the scheduler.
#include "machine.hpp"

#include <csignal>
#include <cstdlib>

namespace simt {

LaneIndex* current = nullptr;
Machine machine;

namespace {

constexpr u32 kMostShared = 232448;  // what a CTA of sm_90 may ask for
struct Failed {};                    // thrown in the scheduler; a lane that fails only leaves for it
constexpr u64 kEndless = 3'000'000;  // steps without a change

}  // namespace

u32 Random::next() {  // splitmix64
    u64 x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return static_cast<u32>((x ^ (x >> 31)) >> 32);
}

// -- lanes -------------------------------------------------------------------------------------------------------------------------------

void run_lane() {
    const Grid& grid = *machine.cta().grid;
    grid.entry->call(grid.args.get());
    machine.end_lane();
}

void Machine::set_runnable(Warp& warp, u32 lanes) {
    warp.runnable = lanes;
    if (lanes != 0 && warp.ready_at < 0) {
        warp.ready_at = static_cast<int>(ready_.size());
        ready_.push_back(&warp);
    } else if (lanes == 0 && warp.ready_at >= 0) {
        ready_[warp.ready_at] = ready_.back();
        ready_[warp.ready_at]->ready_at = warp.ready_at;
        ready_.pop_back();
        warp.ready_at = -1;
    }
}

void Machine::wake(Lane& lane) {
    lane.wait = Wait::kNothing;
    set_runnable(*lane.warp, lane.warp->runnable | 1u << lane.index);
}

// To another lane of this warp, else to the scheduler.
void Machine::hand_over() {
    Lane& from = lane();
    Warp& warp = *from.warp;
    if (warp.runnable == 0) {
        warp.yields = false;
        from.fiber.switch_to(scheduler_);
        return;
    }
    int next = from.index;
    do next = (next + warp.stride) % kWarpSize;
    while ((warp.runnable >> next & 1) == 0);
    current = &warp.lanes[next];
    from.fiber.switch_to(warp.lanes[next].fiber);
}

void Machine::block(Wait wait, const void* key, u64 detail, const void* where) {
    Lane& lane = this->lane();
    lane.wait = wait, lane.key = key, lane.detail = detail, lane.where = where;
    set_runnable(*lane.warp, lane.warp->runnable & ~(1u << lane.index));
    hand_over();
}

void Machine::perhaps_yield() {
    if (++steps_ > kEndless) fail(format("%llu steps without any that others could wait for", static_cast<unsigned long long>(kEndless)));
    const bool woken = changes_seen_ != changes_;
    changes_seen_ = changes_;
    if (!random.one_in(woken ? style.woken : style.switching)) return;
    Lane& lane = this->lane();
    if (style.lanes_apart || lane.warp->runnable == 1u << lane.index)
        yield();
    else
        lane.warp->yields = true;
}

void Machine::yield() {
    Lane& lane = this->lane();
    lane.warp->yields = false;
    lane.warp->next = lane.index;
    lane.fiber.switch_to(scheduler_);
}

void Machine::changed() {
    ++changes_;
    steps_ = 0;
    last_looks_ = 0;
    for (Lane* lane : flag_waits) wake(*lane);
    flag_waits.clear();
}

void Machine::release(Barrier& barrier) {
    barrier.arrived = 0;
    barrier.result = barrier.votes;
    barrier.votes = 0;
    for (Lane* lane : barrier.waiting) wake(*lane);
    barrier.waiting.clear();
    changed();
}

void Machine::end_lane() {
    Lane& lane = this->lane();
    Warp& warp = *lane.warp;
    Cta& cta = *warp.cta;
    if (StackPool::overflowed(lane.stack)) fail("a lane's stack has overflowed");
    if (warp.arrived != 0) fail("a lane ends while others of its warp wait for it");
    if (!warp.products.empty()) fail("a warp ends with products in flight");
    if (!lane.copies.empty()) fail("a lane ends with cp.async in flight");
    stacks_.give_back(lane.stack);
    warp.live &= ~(1u << lane.index);
    --cta.cluster->lanes;
    if (--cta.live == 0) {
        ended_.push_back(&cta);
    } else {
        Barrier& all = cta.barriers[0];
        if (all.arrived != 0 && all.expected == 0 && all.arrived == cta.live) release(all);
    }
    set_runnable(warp, warp.runnable & ~(1u << lane.index));
    hand_over();
    std::abort();  // nobody comes back to a lane that has ended
}

void Machine::fail(const std::string& words) {
    if (!failed_) {
        failed_ = true;
        error_ = words;
        if (current != nullptr) error_ += "\n  in " + describe(lane());
    }
    if (current == nullptr) throw Failed{};
    lane().fiber.switch_to(scheduler_);
    std::abort();
}

// -- the scheduler -----------------------------------------------------------------------------------------------------------------------

void Machine::draw_style(u64 seed, bool lanes_apart) {
    random = Random(seed);
    const auto any = [&](std::initializer_list<u32> choices) { return choices.begin()[random.below(static_cast<u32>(choices.size()))]; };
    style.switching = any({4, 30, 300, 0});
    style.woken = any({1, 2, 10});
    style.landing = any({1, 4, 30, 0});
    style.at_once = any({0, 8, 2});
    style.eager = any({0, 2, 1});
    style.priorities = random.one_in(2);
    style.reordering = any({4, 60, 1000});
    style.residents = any({1, 3, 7, 40});
    style.lanes_apart = lanes_apart;
}

Warp& Machine::choose() {
    if (!style.priorities) return *ready_[random.below(static_cast<u32>(ready_.size()))];
    Warp* first = ready_.front();
    for (Warp* warp : ready_)
        if (warp->priority > first->priority) first = warp;
    if (random.one_in(style.reordering)) first->priority = random.next();
    return *first;
}

void Machine::add(Event event) {
    if (random.one_in(style.at_once)) {
        event.happen();
        changed();
    } else {
        events_.push_back(std::move(event));
    }
}

void Machine::land_any() {
    const u32 i = random.below(static_cast<u32>(events_.size()));
    Event event = std::move(events_[i]);
    events_[i] = std::move(events_.back());
    events_.pop_back();
    event.happen();
    changed();
}

namespace {

// A wild access of a kernel is an error with a place, not the end of the process. Lanes have no room for a handler on their stacks.
class Faults {
public:
    Faults() : stack_(std::make_unique<std::byte[]>(kStack)) {
        stack_t stack{};
        stack.ss_sp = stack_.get(), stack.ss_size = kStack;
        sigaltstack(&stack, &old_stack_);
        struct sigaction action{};
        action.sa_sigaction = [](int, siginfo_t* info, void*) {
            if (current == nullptr) std::abort();
            machine.fail(format("access to address %p, where no memory is, after this place", info->si_addr));
        };
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &old_action_);
        sigaction(SIGBUS, &action, &old_bus_action_);
    }
    ~Faults() {
        sigaction(SIGSEGV, &old_action_, nullptr);
        sigaction(SIGBUS, &old_bus_action_, nullptr);
        sigaltstack(&old_stack_, nullptr);
    }

private:
    static constexpr std::size_t kStack = 256 * 1024;
    std::unique_ptr<std::byte[]> stack_;
    stack_t old_stack_{};
    struct sigaction old_action_{}, old_bus_action_{};
};

}  // namespace

std::string Machine::run(u64 seed, bool lanes_apart) {
    const Faults faults;
    draw_style(seed, lanes_apart);
    failed_ = false;
    error_.clear();
    steps_ = last_looks_ = 0;
    try {
        schedule();
    } catch (Failed) {
    }
    current = nullptr;
    forget_all();
    return error_;
}

void Machine::schedule() {
    while (!failed_) {
        current = nullptr;
        end_ctas();
        admit();
        if (!events_.empty() && random.one_in(style.landing)) land_any();
        if (ready_.empty()) {
            if (!events_.empty()) {
                land_any();
            } else if (grids_.empty()) {
                break;
            } else if (!flag_waits.empty() && last_looks_ < 3) {
                // They have seen the flags as they are; but a kernel may look once more for another reason.
                const u32 looks = last_looks_ + 1;
                changed();
                last_looks_ = looks;
            } else {
                fail(stuck());
            }
            continue;
        }
        Warp& warp = choose();
        int next = style.lanes_apart ? static_cast<int>(random.below(kWarpSize)) : warp.next;
        while ((warp.runnable >> next & 1) == 0) next = (next + warp.stride) % kWarpSize;
        current = &warp.lanes[next];
        scheduler_.switch_to(warp.lanes[next].fiber);
    }
}

void Machine::forget_all() {
    for (auto& grid : grids_)
        for (auto& cta : grid->running)
            for (auto& warp : cta->warps)
                for (Lane& lane : warp->lanes)
                    if (warp->live >> lane.index & 1) stacks_.give_back(lane.stack);
    events_.clear();
    ready_.clear();
    ended_.clear();
    flag_waits.clear();
    grid_waits.clear();
    grids_.clear();
}

}  // namespace simt

// -- for Python --------------------------------------------------------------------------------------------------------------------------

extern "C" {

// Null, or why the launch is refused.
const char* simt_enqueue(const simt::Entry* entry, unsigned ctas, unsigned block, unsigned smem, const void* args, int overlaps, int together) {
    if (ctas == 0 || ctas % entry->cluster_ctas != 0) return "the grid is empty or no multiple of the cluster";
    if (block == 0 || block % simt::kWarpSize != 0 || block > 1024) return "a block is 32 to 1024 threads, whole warps";
    if (smem > simt::kMostShared) return "more shared memory than a CTA may have";
    simt::machine.enqueue(*entry, {ctas, block, smem, overlaps != 0, together != 0}, args);
    return nullptr;
}

// Null, or what went wrong; valid until the next call.
const char* simt_run(unsigned long long seed, int lanes_apart) {
    static std::string error;
    error = simt::machine.run(seed, lanes_apart != 0);
    return error.empty() ? nullptr : error.c_str();
}

}
