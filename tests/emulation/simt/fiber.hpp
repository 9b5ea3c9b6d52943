// Fibers: stacks that the machine switches between by itself.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace simt {

// A place to continue at. Its stack is the caller's own (the scheduler's) or one of a pool.
class Fiber {
public:
    Fiber();
    ~Fiber();
    Fiber(Fiber&&) noexcept;
    Fiber& operator=(Fiber&&) noexcept;
    // Will begin with body(), which must never return, on this stack.
    void prepare(std::byte* stack, std::size_t bytes, void (*body)());
    // Leaves this one, which runs, for another.
    void switch_to(Fiber& other);

private:
    struct Context;
    std::unique_ptr<Context> context_;
};

// Stacks that are used again by later lanes.
class StackPool {
public:
    static constexpr std::size_t kBytes = 845 * 64;  // no multiple of 4096: hot ends of stacks must not share cache sets
    ~StackPool();
    std::byte* take();
    void give_back(std::byte* stack);
    static bool overflowed(const std::byte* stack);

private:
    std::vector<std::byte*> free_;
    std::vector<void*> slabs_;
};

}  // namespace simt
