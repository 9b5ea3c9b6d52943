// PTX of common/cluster.cuh, for the emulated GPU.
#pragma once

KDA_DEVICE u32 cluster_rank() { return simt::cluster_rank(); }
KDA_DEVICE u32 peer_address(u32 shared, u32 rank) { return simt::shared_address_in(shared, rank); }
KDA_DEVICE void cluster_meet() { simt::sync_cluster(); }
KDA_DEVICE void cluster_sync() { simt::sync_cluster(); }
KDA_DEVICE void peer_mbarrier_arrive(u32 barrier) { simt::mbarrier_arrive(barrier, 0); }
KDA_DEVICE void peer_mbarrier_arrive_expect_bytes(u32 barrier, u32 bytes) { simt::mbarrier_arrive(barrier, bytes); }
KDA_DEVICE void bulk_copy_to_peer(u32 peer, u32 own, u32 bytes, u32 peer_barrier) { simt::bulk_copy_to_peer(peer, own, bytes, peer_barrier); }
