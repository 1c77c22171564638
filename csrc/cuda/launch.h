// How an op over many layers becomes one launch.
//
// An op is a struct: a table of layers, passed by value with the launch (nothing to copy to the device, nothing that
// must outlive the call, and a CUDA graph records it), and `phase<i>(shared, block, thread)` for each of its PHASES,
// between which the threads of a block wait for each other. Without nvcc the same source compiles to plain loops over
// blocks and threads: the emulation that the tests run.
#pragma once

#include "number.h"
#include "triangle.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define DS_KFAC_UNROLL _Pragma("unroll")
#else
#define DS_KFAC_UNROLL
#endif
#define DS_KFAC_API extern "C" __attribute__((visibility("default")))

namespace ds_kfac {

constexpr int THREADS = 256;

#ifdef DS_KFAC_LAYERS
constexpr int LAYERS = DS_KFAC_LAYERS;  // few, for tests of several launches
#elif defined(CUDART_VERSION) && CUDART_VERSION < 12010
constexpr int LAYERS = 64;  // a launch carries 4 KB
#else
constexpr int LAYERS = 512;  // a launch carries 32,764 bytes
#endif

// Which layer a block of threads works on. `first_block` is the number of blocks of all layers before.
template <class Layer> struct Table {
    Layer layers[LAYERS];
    int first_block[LAYERS];
    int count;

    DS_KFAC_DEVICE int find(int block) const {
        int low = 0, high = count;  // a layer without elements shares its first block with the next one
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_block[middle] <= block)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
};

struct Nothing {};

DS_KFAC_BOTH constexpr int64_t blocks_for(int64_t elements, int64_t per_block) {
    return (elements + per_block - 1) / per_block;
}

#ifdef __CUDACC__

template <int i, class Op> __device__ __forceinline__ void run_phases(const Op &op, typename Op::Shared &shared) {
    op.template phase<i>(shared, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
    if constexpr (i + 1 < Op::PHASES) {
        __syncthreads();
        run_phases<i + 1>(op, shared);
    }
}

template <class Op> __global__ void __launch_bounds__(THREADS) run(const __grid_constant__ Op op) {
    __shared__ typename Op::Shared shared;
    run_phases<0>(op, shared);
}

template <class Op> int launch(const Op &op, int64_t blocks, void *stream) {
    static_assert(sizeof(Op) <= (LAYERS == 64 ? 4096 : 32764), "a launch carries no more");
    if (blocks == 0) return cudaSuccess;
    if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
    void *arguments[] = {const_cast<Op *>(&op)};
    return cudaLaunchKernel(reinterpret_cast<const void *>(&run<Op>), dim3(static_cast<unsigned>(blocks)),
                            dim3(THREADS), arguments, 0, static_cast<cudaStream_t>(stream));
}

inline int fill(uint8_t *bytes, int value, int count, void *stream) {
    return cudaMemsetAsync(bytes, value, static_cast<size_t>(count), static_cast<cudaStream_t>(stream));
}

#else

inline int fill(uint8_t *bytes, int value, int count, void *) {
    std::memset(bytes, value, static_cast<size_t>(count));
    return 0;
}

template <int i, class Op> void run_phases(const Op &op, typename Op::Shared &shared, int block) {
    // odd blocks backwards: an order of threads that the kernel must not rely on
    for (int thread = 0; thread < THREADS; ++thread)
        op.template phase<i>(shared, block, block % 2 ? THREADS - 1 - thread : thread);
    if constexpr (i + 1 < Op::PHASES) run_phases<i + 1>(op, shared, block);
}

template <class Op> int launch(const Op &op, int64_t blocks, void *) {
    for (int64_t block = blocks - 1; block >= 0; --block) {
        typename Op::Shared shared;
        std::memset(static_cast<void *>(&shared), 0xff, sizeof shared);  // NaN
        run_phases<0>(op, shared, static_cast<int>(block));
    }
    return 0;
}

#endif

// Launches `op` over `count` layers, in as few launches as their number allows. `layer_of(i)` describes layer i.
template <class Op, class LayerOf> int launch_layers(Op &op, int count, LayerOf layer_of, void *stream) {
    for (int first = 0; first < count; first += LAYERS) {
        op.table.count = count - first < LAYERS ? count - first : LAYERS;
        int64_t blocks = 0;
        for (int i = 0; i < op.table.count; ++i) {
            op.table.layers[i] = layer_of(first + i);
            op.table.first_block[i] = static_cast<int>(blocks);
            blocks += Op::blocks(op.table.layers[i]);
        }
        if (const int error = launch(op, blocks, stream)) return error;
    }
    return 0;
}

}  // namespace ds_kfac
