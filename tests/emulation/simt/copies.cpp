// Copies that land at some time between where they are asked for and where they are waited for. Until then their target is NaN, so
// that who reads too early, or is overwritten, sees it; their source is read when they land.
#include "machine.hpp"

#include <algorithm>
#include <cstring>

namespace simt {

void complete_bytes(Cta& cta, std::byte* memory, u32 bytes);
void complete_arrival(Cta& cta, std::byte* memory);

namespace {

constexpr u32 kPiece = 16;  // bytes of a cp.async, and of a swizzle

void land(const LaneCopy& copy) {
    if (copy.from != nullptr)
        std::memcpy(copy.to, copy.from, kPiece);
    else
        std::memset(copy.to, 0, kPiece);
}
void land_until(Lane& lane, u64 number) {
    for (; lane.copies_landed < number; ++lane.copies_landed) {
        land(lane.copies.front());
        lane.copies.pop_front();
    }
}

void need_alignment(const void* p, u32 alignment) {
    if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0) machine.fail("a copy from or to global memory that is not aligned");
}

// What a CUtensorMap holds here; tests/emulation/machine.py writes it.
struct TensorLayout {
    u64 mark;
    const std::byte* address;
    u64 extent[3];  // channels, tokens, rows
    u64 stride[2];  // bytes between tokens, rows
    u32 box[3];
    u32 element_bytes;
};
constexpr u64 kTensorMark = 0x70614d726f736e54;  // "TnsorMap"

// Splits a copy at random, since the hardware lands it in pieces.
u32 first_part(u32 bytes) {
    const u32 pieces = bytes / kPiece;
    return pieces > 1 && machine.random.one_in(2) ? (1 + machine.random.below(pieces - 1)) * kPiece : bytes;
}

void copy_in_parts(Cta& target, std::byte* to, const std::byte* from, const Cta* source, u32 bytes, std::byte* barrier) {
    std::memset(to, 0xff, bytes);
    for (u32 begin = 0; begin < bytes;) {
        const u32 part = first_part(bytes - begin);
        machine.add({Event::kLoad, &target, source, &machine.lane(), 0, [&target, to = to + begin, from = from + begin, part, barrier] {
                         std::memcpy(to, from, part);
                         complete_bytes(target, barrier, part);
                     }});
        begin += part;
    }
    machine.perhaps_yield();
}

}  // namespace

// -- cp.async ----------------------------------------------------------------------------------------------------------------------------

void copy_async(u32 to, const void* from, bool live) {
    Lane& lane = machine.lane();
    lane.where = SIMT_HERE;
    const LaneCopy copy{machine.shared(own(to), kPiece, kPiece), live ? from : nullptr, lane.copy_group};
    if (live) need_alignment(from, kPiece);
    std::memset(copy.to, 0xff, kPiece);
    lane.copies.push_back(copy);
    if (machine.random.one_in(machine.style.at_once)) land(copy);  // and once more at the wait, if its source has changed by then
}
void copy_async_commit() { ++machine.lane().copy_group; }
void copy_async_wait(int pending) {
    Lane& lane = machine.lane();
    const u32 end = pending < 0 ? lane.copy_group + 1 : lane.copy_group - std::min<u32>(pending, lane.copy_group);
    while (!lane.copies.empty() && lane.copies.front().group < end) land_until(lane, lane.copies_landed + 1);
    machine.perhaps_yield();
}
void mbarrier_arrive_after_copies(u32 address) {
    Lane& lane = machine.lane();
    lane.where = SIMT_HERE;
    std::byte* barrier = machine.shared(own(address), 8, 8);
    Cta& cta = machine.cta();
    const u64 until = lane.copies_landed + lane.copies.size();
    machine.add({Event::kArrival, &cta, nullptr, &lane, 0, [&lane, &cta, barrier, until] {
                     land_until(lane, until);
                     complete_arrival(cta, barrier);
                 }});
    machine.perhaps_yield();
}

// -- bulk copies -------------------------------------------------------------------------------------------------------------------------

void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    machine.lane().where = SIMT_HERE;
    Cta& target = machine.cta_of(to);
    std::byte* memory = machine.shared(barrier, 8, 8);
    if (&machine.cta_of(barrier) != &target) machine.fail("a bulk copy whose mbarrier is not where it goes");
    if (bytes % kPiece != 0) machine.fail("a bulk copy of bytes that are no multiple of 16");
    need_alignment(from, kPiece);
    const auto* source = static_cast<const std::byte*>(from);
    copy_in_parts(target, machine.shared(to, bytes, kPiece), source, nullptr, bytes, memory);
}
void bulk_copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier) {
    machine.lane().where = SIMT_HERE;
    Cta& target = machine.cta_of(to);
    std::byte* memory = machine.shared(barrier, 8, 8);
    if (&machine.cta_of(barrier) != &target) machine.fail("a bulk copy whose mbarrier is not where it goes");
    if (bytes % kPiece != 0) machine.fail("a bulk copy of bytes that are no multiple of 16");
    copy_in_parts(target, machine.shared(to, bytes, kPiece), machine.shared(own(from), bytes, kPiece), &machine.cta(), bytes, memory);
}

void bulk_store(void* to, u32 from, u32 bytes) {
    Lane& lane = machine.lane();
    lane.where = SIMT_HERE;
    if (bytes % kPiece != 0) machine.fail("a bulk copy of bytes that are no multiple of 16");
    need_alignment(to, kPiece);
    const std::byte* source = machine.shared(own(from), bytes, kPiece);
    auto* target = static_cast<std::byte*>(to);
    std::memset(target, 0xff, bytes);
    const u32 group = lane.store_group;
    machine.add({Event::kStoreRead, &machine.cta(), nullptr, &lane, group, [&lane, source, target, bytes, group] {
                     std::vector<std::byte> content(source, source + bytes);
                     machine.add({Event::kStoreWrite, nullptr, nullptr, &lane, group, [target, content = std::move(content)] {
                                      std::memcpy(target, content.data(), content.size());
                                  }});
                 }});
    machine.perhaps_yield();
}
void bulk_store_commit() { ++machine.lane().store_group; }
void bulk_store_wait(int pending, bool only_read) {
    Lane& lane = machine.lane();
    const u32 end = lane.store_group - std::min<u32>(pending, lane.store_group);
    machine.happen_all([&](const Event& event) {
        const bool counts = event.kind == Event::kStoreRead || (event.kind == Event::kStoreWrite && !only_read);
        return counts && event.lane == &lane && event.group < end;
    });
    machine.perhaps_yield();
}

static TensorLayout tensor_layout(const void* map) {
    TensorLayout x;
    std::memcpy(&x, map, sizeof x);
    if (x.mark != kTensorMark) machine.fail("a tensor copy by what is no tensor map");
    // The 128-byte swizzle takes bits 7 .. 9 of the address into bits 4 .. 6, so a tile begins where those are zero.
    if (x.box[0] * x.element_bytes != 128 || x.box[2] != 1) machine.fail("a tensor map whose boxes are not rows of 128 bytes");
    return x;
}
void tensor_copy(u32 to, const void* map, int channel, int token, int row, u32 barrier) {
    machine.lane().where = SIMT_HERE;
    const TensorLayout x = tensor_layout(map);
    Cta& target = machine.cta_of(to);
    std::byte* memory = machine.shared(barrier, 8, 8);
    if (&machine.cta_of(barrier) != &target) machine.fail("a bulk copy whose mbarrier is not where it goes");
    const u32 row_bytes = x.box[0] * x.element_bytes, tokens = x.box[1];
    std::byte* tile = machine.shared(to, row_bytes * tokens, 1024);
    std::memset(tile, 0xff, row_bytes * tokens);
    const auto copy_rows = [=, &target](u32 begin, u32 end) {
        for (u32 i = begin; i < end; ++i) {
            for (u32 piece = 0; piece < row_bytes / kPiece; ++piece) {
                std::byte* destination = tile + i * row_bytes + ((piece ^ (i & 7)) * kPiece);
                const u32 elements = kPiece / x.element_bytes;
                for (u32 e = 0; e < elements; ++e) {
                    const long long at[3] = {static_cast<long long>(channel) + piece * elements + e, static_cast<long long>(token) + i, row};
                    bool inside = true;
                    for (int d = 0; d < 3; ++d) inside &= at[d] >= 0 && static_cast<u64>(at[d]) < x.extent[d];
                    std::byte* element = destination + e * x.element_bytes;
                    if (inside)
                        std::memcpy(element, x.address + at[0] * x.element_bytes + at[1] * x.stride[0] + at[2] * x.stride[1], x.element_bytes);
                    else
                        std::memset(element, 0, x.element_bytes);
                }
            }
        }
        complete_bytes(target, memory, (end - begin) * row_bytes);
    };
    const u32 cut = machine.random.one_in(2) ? machine.random.below(tokens) : 0;
    for (const auto& [begin, end] : {std::pair{0u, cut}, std::pair{cut, tokens}}) {
        if (begin == end) continue;
        machine.add({Event::kLoad, &target, nullptr, &machine.lane(), 0, [copy_rows, begin = begin, end = end] { copy_rows(begin, end); }});
    }
    machine.perhaps_yield();
}

void tensor_store(u32 from, const void* map, int channel, int token, int row) {
    Lane& lane = machine.lane();
    lane.where = SIMT_HERE;
    const TensorLayout x = tensor_layout(map);
    const u32 row_bytes = x.box[0] * x.element_bytes, tokens = x.box[1];
    const std::byte* tile = machine.shared(own(from), row_bytes * tokens, 1024);
    std::vector<std::pair<std::byte*, u32>> places;  // where a piece goes, and where it lies in the tile
    for (u32 i = 0; i < tokens; ++i) {
        for (u32 piece = 0; piece < row_bytes / kPiece; ++piece) {
            const u32 elements = kPiece / x.element_bytes;
            const long long at[3] = {static_cast<long long>(channel) + piece * elements, static_cast<long long>(token) + i, row};
            bool inside = true;
            for (int d = 0; d < 3; ++d) inside &= at[d] >= 0 && static_cast<u64>(at[d]) + (d == 0 ? elements : 1) <= x.extent[d];
            if (!inside) machine.fail("a tensor store that is not all inside of the tensor");
            std::byte* target = const_cast<std::byte*>(x.address) + at[0] * x.element_bytes + at[1] * x.stride[0] + at[2] * x.stride[1];
            std::memset(target, 0xff, kPiece);
            places.emplace_back(target, i * row_bytes + (piece ^ (i & 7)) * kPiece);
        }
    }
    const u32 group = lane.store_group, bytes = row_bytes * tokens;
    machine.add({Event::kStoreRead, &machine.cta(), nullptr, &lane, group, [&lane, tile, bytes, group, places = std::move(places)] {
                     std::vector<std::byte> content(tile, tile + bytes);
                     machine.add({Event::kStoreWrite, nullptr, nullptr, &lane, group, [content = std::move(content), places = std::move(places)] {
                                      for (const auto& [target, at] : places) std::memcpy(target, content.data() + at, kPiece);
                                  }});
                 }});
    machine.perhaps_yield();
}

}  // namespace simt
