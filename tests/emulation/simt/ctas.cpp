// Grids, clusters and CTAs: which of them are there, and their shared memory.
#include "machine.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace simt {

namespace {

constexpr u32 kReserved = 1024;  // the first kilobyte of shared memory is the system's
constexpr u32 kStaticRoom = 1024;
constexpr u32 kGuard = 1024;
constexpr int kGuardByte = 0xa5;

std::unique_ptr<std::byte, void (*)(void*)> allocate(std::size_t bytes, std::size_t alignment) {
    const std::size_t whole = (bytes + alignment - 1) / alignment * alignment;
    return {static_cast<std::byte*>(std::aligned_alloc(alignment, whole)), std::free};
}

}  // namespace

std::byte* Cta::at(u32 offset, u32 bytes, u32 alignment) {
    const u32 end = kReserved + dynamic_bytes + (static_bytes != 0 ? kStaticRoom : 0);
    if (offset < kReserved || bytes > end || offset > end - bytes)
        machine.fail(format("%u bytes at shared address %#x, outside of the CTA's %u bytes from %#x on", bytes, offset, end - kReserved, kReserved));
    if (offset % alignment != 0) machine.fail(format("shared address %#x is no multiple of %u", offset, alignment));
    return memory.get() + offset;
}

void* dynamic_shared() { return machine.cta().memory.get() + kReserved; }

void* static_shared(const void* key, u32 bytes, u32 alignment) {
    Cta& cta = machine.cta();
    const u32 first = kReserved + cta.dynamic_bytes;
    for (const auto& [known, offset] : cta.statics)
        if (known == key) return cta.memory.get() + first + offset;
    const u32 offset = (cta.static_bytes + alignment - 1) / alignment * alignment;
    if (offset + bytes > kStaticRoom) machine.fail("more __shared__ variables than there is room for");
    cta.static_bytes = offset + bytes;
    cta.statics.emplace_back(key, offset);
    return cta.memory.get() + first + offset;
}

u32 shared_address(const void* p) {
    const Cta& cta = machine.cta();
    const auto offset = static_cast<const std::byte*>(p) - cta.memory.get();
    if (offset < kReserved || offset > kReserved + cta.dynamic_bytes + kStaticRoom)
        machine.fail("a pointer that is not into the CTA's shared memory, taken for one");
    return cta.rank << 24 | static_cast<u32>(offset);
}

u32 shared_address_in(u32 address, u32 rank) {
    if (rank >= machine.cta().cluster->ctas.size()) machine.fail(format("mapa to rank %u, which the cluster does not have", rank));
    return rank << 24 | (address & 0xffffffu);
}
u32 cluster_rank() { return machine.cta().rank; }
u32 own(u32 address) {
    if (address >> 24 != machine.cta().rank) machine.fail(format("%#x, an address of a peer, where only one's own shared memory may be meant", address));
    return address;
}
const void* shared_pointer(u32 address, u32 bytes) { return machine.shared(own(address), bytes, bytes); }

Cta& Machine::cta_of(u32 address) {
    Cluster& cluster = *cta().cluster;
    const u32 rank = address >> 24;
    if (rank >= cluster.ctas.size()) fail(format("shared address %#x of rank %u, which the cluster does not have", address, rank));
    Cta& found = *cluster.ctas[rank];
    if (found.live == 0) fail("access to the shared memory of a peer that has ended");
    return found;
}
std::byte* Machine::shared(u32 address, u32 bytes, u32 alignment) { return cta_of(address).at(address & 0xffffffu, bytes, alignment); }

void Machine::start_cluster(Grid& grid) {
    const u32 count = grid.entry->cluster_ctas, warps = grid.launch.block / kWarpSize;
    auto cluster = std::make_shared<Cluster>();
    for (u32 rank = 0; rank < count; ++rank) {
        auto cta = std::make_unique<Cta>();
        cta->grid = &grid;
        cta->cluster = cluster;
        cta->rank = rank;
        cta->number = grid.next++;
        cta->dynamic_bytes = grid.launch.smem;
        cta->live = static_cast<int>(grid.launch.block);
        const std::size_t bytes = kReserved + grid.launch.smem + kStaticRoom;
        cta->memory = allocate(bytes + kGuard, 1024);
        std::memset(cta->memory.get(), 0xff, bytes);  // NaN, in every format
        std::memset(cta->memory.get() + bytes, kGuardByte, kGuard);
        for (u32 w = 0; w < warps; ++w) {
            auto warp = std::make_unique<Warp>();
            warp->cta = cta.get();
            warp->index = static_cast<int>(w);
            warp->priority = random.next();
            for (int i = 0; i < kWarpSize; ++i) {
                Lane& lane = warp->lanes[i];
                lane.thread = {w * kWarpSize + i, 0, 0};
                lane.block = {cta->number, 0, 0};
                lane.block_size = {grid.launch.block, 1, 1};
                lane.grid_size = {grid.launch.ctas, 1, 1};
                lane.warp = warp.get();
                lane.index = i;
                lane.stack = stacks_.take();
                lane.fiber.prepare(lane.stack, StackPool::kBytes, run_lane);
            }
            warp->next = static_cast<int>(random.below(kWarpSize));
            set_runnable(*warp, kAllLanes);
            cta->warps.push_back(std::move(warp));
        }
        cluster->lanes += cta->live;
        cluster->ctas.push_back(cta.get());
        grid.running.push_back(std::move(cta));
    }
    changed();
}

// Starts CTAs of the first grid, and of those behind it that may overlap with the one ahead of them.
void Machine::admit() {
    const Grid* ahead = nullptr;
    for (auto& grid : grids_) {
        if (ahead != nullptr && !(grid->launch.overlaps && ahead->triggered == ahead->launch.ctas)) break;
        const u32 most = grid->launch.together || grid->entry->cluster_ctas > 1 ? grid->launch.ctas : style.residents;
        while (grid->next < grid->launch.ctas && grid->running.size() < most) start_cluster(*grid);
        if (grid->next < grid->launch.ctas) break;
        ahead = grid.get();
    }
}

void Machine::end_ctas() {
    if (ended_.empty()) return;
    for (Cta* cta : ended_) {
        Grid& grid = *cta->grid;
        for (const Event& event : events_) {
            if (event.of == cta || event.and_of == cta)
                fail(format("CTA %u of %s ends with copies from or to its shared memory in flight", cta->number, grid.entry->name));
        }
        const std::byte* guard = cta->memory.get() + kReserved + cta->dynamic_bytes + kStaticRoom;
        if (std::any_of(guard, guard + kGuard, [](std::byte x) { return x != std::byte{kGuardByte}; }))
            fail(format("CTA %u of %s wrote past the end of its shared memory", cta->number, grid.entry->name));
        for (const auto& warp : cta->warps) {
            if (warp->products_issued != cta->warps[warp->index / 4 * 4]->products_issued)
                fail(format("CTA %u of %s: warps of a warpgroup have issued different wgmma", cta->number, grid.entry->name));
        }
        if (!cta->triggered) ++grid.triggered;
        ++grid.ended;
    }
    ended_.clear();
    for (auto& grid : grids_) {
        // A cluster's CTAs stay until all have ended, since they know each other.
        auto& running = grid->running;
        running.erase(std::remove_if(running.begin(), running.end(), [](const auto& cta) { return cta->cluster->lanes == 0; }), running.end());
    }
    changed();
    while (!grids_.empty() && grids_.front()->ended == grids_.front()->launch.ctas) {
        happen_all([](const Event& event) { return event.kind == Event::kStoreWrite; });
        grids_.pop_front();
        for (Lane* lane : grid_waits) wake(*lane);
        grid_waits.clear();
    }
}

void launch_dependents() {
    Cta& cta = machine.cta();
    if (cta.triggered) return;
    cta.triggered = true;
    ++cta.grid->triggered;
    machine.changed();
}
void wait_for_prerequisites() {
    const Grid& grid = *machine.cta().grid;
    while (machine.before_all_ended(grid)) {
        machine.grid_waits.push_back(&machine.lane());
        machine.block(Wait::kGrid, &grid, 0, SIMT_HERE);
    }
}

void Machine::enqueue(const Entry& entry, const Launch& launch, const void* args) {
    auto grid = std::make_unique<Grid>();
    grid->entry = &entry;
    grid->launch = launch;
    grid->args = allocate(std::max<std::size_t>(entry.args_bytes, 64), 64);
    if (entry.args_bytes != 0) std::memcpy(grid->args.get(), args, entry.args_bytes);
    grids_.push_back(std::move(grid));
}

}  // namespace simt
