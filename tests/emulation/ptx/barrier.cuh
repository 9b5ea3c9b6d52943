// PTX of common/barrier.cuh, for the emulated GPU. Fences do nothing: here memory is in order, and what a copy may see is a
// matter of when.
#pragma once

KDA_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) { simt::mbarrier_init(simt::own(barrier), arrivals); }
KDA_DEVICE void mbarrier_init_fence() {}
KDA_DEVICE void mbarrier_arrive(u32 barrier) { simt::mbarrier_arrive(simt::own(barrier), 0); }
KDA_DEVICE void mbarrier_arrive_expect_bytes(u32 barrier, u32 bytes) { simt::mbarrier_arrive(simt::own(barrier), bytes); }
KDA_DEVICE void mbarrier_expect_bytes(u32 barrier, u32 bytes) { simt::mbarrier_expect(simt::own(barrier), bytes); }
KDA_DEVICE void mbarrier_arrive_after_cp_async(u32 barrier) { simt::mbarrier_arrive_after_copies(barrier); }
KDA_DEVICE void mbarrier_wait(u32 barrier, u32 parity) { simt::mbarrier_wait(simt::own(barrier), parity); }
KDA_DEVICE bool mbarrier_test(u32 barrier, u32 parity) { return simt::mbarrier_test(simt::own(barrier), parity); }

KDA_DEVICE bool elect_one() { return __ffs(__ballot_sync(0xffffffffu, true)) == (threadIdx.x & 31) + 1; }

KDA_DEVICE void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier) { simt::bulk_copy(shared, global, bytes, barrier); }
KDA_DEVICE void bulk_prefetch(const void*, u32) {}
KDA_DEVICE void bulk_store(void* global, u32 shared, u32 bytes) { simt::bulk_store(global, shared, bytes); }
KDA_DEVICE void bulk_store_commit() { simt::bulk_store_commit(); }
template <int kPending>
KDA_DEVICE void bulk_store_wait_read() {
    simt::bulk_store_wait(kPending, true);
}
template <int kPending>
KDA_DEVICE void bulk_store_wait() {
    simt::bulk_store_wait(kPending, false);
}
KDA_DEVICE void async_proxy_fence() {}
KDA_DEVICE void global_async_proxy_fence() {}

KDA_DEVICE u32 load_acquire(const u32* p) { return simt::poll(p); }
KDA_DEVICE u64 load_acquire(const u64* p) { return simt::poll(p); }
KDA_DEVICE u32 load_relaxed(const u32* p) { return simt::poll(p); }
KDA_DEVICE void store_relaxed(u32* p, u32 v) { simt::publish(p, v); }
KDA_DEVICE void store_relaxed(u64* p, u64 v) { simt::publish(p, v); }
KDA_DEVICE void store_release(u64* p, u64 v) { simt::publish(p, v); }
KDA_DEVICE void store_release(u32* p, u32 v) { simt::publish(p, v); }

KDA_DEVICE void named_barrier(int id, int threads) { simt::sync_threads(id, threads); }

template <int kRegisters>
KDA_DEVICE void raise_registers() {}
template <int kRegisters>
KDA_DEVICE void lower_registers() {}
