// What went wrong, in words: where a lane is, and who waits for whom.
#include "machine.hpp"

#include <cstdarg>
#include <cstdio>
#include <map>

#include <dlfcn.h>

namespace simt {

std::string format(const char* words, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, words);
    std::vsnprintf(text, sizeof text, words, arguments);
    va_end(arguments);
    return text;
}

namespace {

// "@file+0x12", for whoever has the file's line table.
std::string place(const void* where) {
    Dl_info info;
    if (where == nullptr || dladdr(where, &info) == 0) return "";
    const auto offset = static_cast<const char*>(where) - static_cast<const char*>(info.dli_fbase);
    return format(" @%s+%#lx", info.dli_fname, static_cast<unsigned long>(offset - 1));
}

}  // namespace

std::string Machine::describe(const Lane& lane) {
    const Cta& cta = *lane.warp->cta;
    return format("%s, CTA %u, warp %d, lane %d", cta.grid->entry->name, cta.number, lane.warp->index, lane.index) + place(lane.where);
}

// Who waits for what, warps that wait alike together.
std::string Machine::stuck() {
    std::map<std::string, std::string> waits;
    for (const auto& grid : grids_) {
        for (const auto& cta : grid->running) {
            for (const auto& warp : cta->warps) {
                std::string last;
                for (const Lane& lane : warp->lanes) {
                    if ((warp->live >> lane.index & 1) == 0) continue;
                    std::string words = grid->entry->name;
                    const auto detail = static_cast<unsigned long>(lane.detail);
                    const auto offset = static_cast<const std::byte*>(lane.key) - cta->memory.get();
                    switch (lane.wait) {
                    case Wait::kNothing: words += ": runs"; break;
                    case Wait::kWarp: words += ": for other lanes of its warp"; break;
                    case Wait::kBarrier: {
                        const Barrier& barrier = cta->barriers[lane.detail];
                        const int expected = barrier.expected != 0 ? barrier.expected : cta->live;
                        words += format(": for barrier %lu, %d of %d threads are there", detail, barrier.arrived, expected);
                        break;
                    }
                    case Wait::kCluster: {
                        const Cluster& cluster = *cta->cluster;
                        words += format(": for its cluster, %d of %d threads are there", cluster.barrier.arrived, cluster.lanes);
                        break;
                    }
                    case Wait::kMbarrier: {
                        const auto at = static_cast<unsigned long>(offset);
                        words += format(": for the phase of parity %lu of the mbarrier at %#lx", detail, at);
                        break;
                    }
                    case Wait::kFlag: words += format(": for a flag in global memory that is %#lx", detail); break;
                    case Wait::kGrid: words += ": for the grid ahead"; break;
                    }
                    words += place(lane.where);
                    if (words == last) continue;
                    last = words;
                    waits[words] += format(" %u.%d", cta->number, warp->index);
                }
            }
        }
    }
    std::string text = "deadlock: nobody can go on. By CTA.warp:";
    for (const auto& [words, who] : waits) text += "\n " + who + "  " + words;
    return text;
}

}  // namespace simt
