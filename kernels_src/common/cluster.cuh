// Two CTAs of a cluster and each other's shared memory (sm_90 and later).
//
// A shared address of one's own is turned into that of the same place in the peer by peer_address; instructions take it where they
// say shared::cluster.
#pragma once
#include "common/barrier.cuh"

KDA_DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
KDA_DEVICE u32 peer_address(u32 shared, u32 rank) {  // of the CTA with this rank
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}
// All threads of both CTAs. Of what was written before, only the barriers that mbarrier_init_fence followed are seen after.
KDA_DEVICE void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same, and all that was written before is seen after.
KDA_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
KDA_DEVICE void peer_mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
KDA_DEVICE void peer_mbarrier_arrive_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// `bytes` contiguous bytes of own shared memory to the peer's, where they count towards the mbarrier's phase.
KDA_DEVICE void bulk_copy_to_peer(u32 peer, u32 own, u32 bytes, u32 peer_barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(peer),
                 "r"(own), "r"(bytes), "r"(peer_barrier)
                 : "memory");
}
