#include "fiber.hpp"

#include <cstdint>
#include <cstring>
#include <new>

#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simt {

#ifdef __x86_64__

// ucontext changes the signal mask with a system call at each switch, which costs ten times as much as what follows.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");

struct Fiber::Context {
    void* stack_pointer = nullptr;
};
void Fiber::prepare(std::byte* stack, std::size_t bytes, void (*body)()) {
    auto* top = reinterpret_cast<std::uintptr_t*>(stack + bytes);
    *--top = 0;  // where body would return to; also aligns the stack as a call does
    *--top = reinterpret_cast<std::uintptr_t>(body);
    for (int i = 0; i < 6; ++i) *--top = 0;
    context_->stack_pointer = top;
}
void Fiber::switch_to(Fiber& other) { simt_switch(&context_->stack_pointer, other.context_->stack_pointer); }

#else

struct Fiber::Context {
    ucontext_t machine;
};
void Fiber::prepare(std::byte* stack, std::size_t bytes, void (*body)()) {
    getcontext(&context_->machine);
    context_->machine.uc_stack.ss_sp = stack;
    context_->machine.uc_stack.ss_size = bytes;
    context_->machine.uc_link = nullptr;
    makecontext(&context_->machine, body, 0);
}
void Fiber::switch_to(Fiber& other) { swapcontext(&context_->machine, &other.context_->machine); }

#endif

Fiber::Fiber() : context_(std::make_unique<Context>()) {}
Fiber::~Fiber() = default;
Fiber::Fiber(Fiber&&) noexcept = default;
Fiber& Fiber::operator=(Fiber&&) noexcept = default;

namespace {
constexpr std::size_t kSlab = 256;  // stacks
constexpr std::uint64_t kUntouched = 0x5afe57ac5afe57ac;  // at the far end of a stack
}  // namespace

StackPool::~StackPool() {
    for (void* slab : slabs_) munmap(slab, kSlab * kBytes);
}
std::byte* StackPool::take() {
    if (free_.empty()) {
        void* slab = mmap(nullptr, kSlab * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (slab == MAP_FAILED) throw std::bad_alloc();
        slabs_.push_back(slab);
        for (std::size_t i = 0; i < kSlab; ++i) free_.push_back(static_cast<std::byte*>(slab) + i * kBytes);
    }
    std::byte* stack = free_.back();
    free_.pop_back();
    std::memcpy(stack, &kUntouched, sizeof kUntouched);
    return stack;
}
void StackPool::give_back(std::byte* stack) { free_.push_back(stack); }
bool StackPool::overflowed(const std::byte* stack) { return std::memcmp(stack, &kUntouched, sizeof kUntouched) != 0; }

}  // namespace simt
