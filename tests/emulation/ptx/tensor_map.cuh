// PTX of common/tensor_map.cuh, for the emulated GPU.
#pragma once

KDA_DEVICE void prefetch_tensor_map(const TensorMap&) {}
KDA_DEVICE void tensor_copy(u32 shared, const TensorMap& map, int channel, int token, int row, u32 barrier) {
    simt::tensor_copy(shared, map.opaque, channel, token, row, barrier);
}
KDA_DEVICE void tensor_store(u32 shared, const TensorMap& map, int channel, int token, int row) {
    simt::tensor_store(shared, map.opaque, channel, token, row);
}
