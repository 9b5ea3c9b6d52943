// Barriers of sm_90 and the copies that complete on them: mbarriers in shared memory, named barriers, 1-D bulk copies.
//
// A phase of an mbarrier ends when all expected arrivals and all expected bytes are in; waiters name the parity of
// the phase they wait for, which starts at 0 and flips each time.
#pragma once
#include "common/types.cuh"

KDA_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Between the inits and the first use by other threads or by bulk copies; those threads need a barrier as well.
KDA_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

KDA_DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
KDA_DEVICE void mbarrier_arrive_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// More bytes for the phase, and no arrival.
KDA_DEVICE void mbarrier_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// One of the expected arrivals, made once all cp.async of this thread so far have landed.
KDA_DEVICE void mbarrier_arrive_after_cp_async(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// By whole warps: a lane that spins alone costs its warp 150 cycles more.
KDA_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\n"
        "bra again;\n"
        "done:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether that phase is over, without waiting.
KDA_DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
    u32 over;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
    return over != 0;
}

// True in one thread of a warp, always the same, once all of its threads are here. ptxas makes a loop over threads of every bulk copy in a branch that it
// cannot see to be one thread's, as it sees here.
KDA_DEVICE bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

// `bytes` contiguous bytes of global memory, both ends aligned to 16; they count towards the mbarrier's phase.
KDA_DEVICE void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}
// Asks for `bytes` of global memory, aligned to 16 both, so that whoever loads them finds them in L2.
KDA_DEVICE void bulk_prefetch(const void* global, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// The way back. Joins the thread's current group; a group is waited for by the thread that committed it.
KDA_DEVICE void bulk_store(void* global, u32 shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}
KDA_DEVICE void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what all groups but the last kPending read may be written again.
template <int kPending>
KDA_DEVICE void bulk_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until all groups but the last kPending are written.
template <int kPending>
KDA_DEVICE void bulk_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// What this thread wrote to shared memory is there for bulk copies, once a barrier has passed. A no-op before sm_90.
KDA_DEVICE void async_proxy_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// What other SMs wrote to global memory, and flags have told of, is there for bulk copies.
KDA_DEVICE void global_async_proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Flags in global memory, between CTAs.
KDA_DEVICE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
KDA_DEVICE u64 load_acquire(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
KDA_DEVICE u32 load_relaxed(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
KDA_DEVICE void store_relaxed(u32* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
KDA_DEVICE void store_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
KDA_DEVICE void store_release(u64* p, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
KDA_DEVICE void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// Joins `threads` threads of the CTA, a multiple of 32; id 0 is __syncthreads's.
KDA_DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers a thread of this warpgroup may use from here on; a multiple of 8.
template <int kRegisters>
KDA_DEVICE void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
KDA_DEVICE void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
