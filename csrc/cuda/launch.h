// Launches an op over many layers at once. The rest of the file has the dtypes of messages, and the
// indices of a packed triangle.
//
// An op is a struct with a table of layers, and with a function `phase<i>(shared, block, thread)`
// for each of its PHASES. The threads of a block wait for each other between phases. The table is
// passed by value with the launch, so nothing is copied to the device, nothing must outlive the
// call, and a CUDA graph records the table. Without nvcc, the tests' emulation.h replaces the parts
// of CUDA that are used here, and a launch is a loop over blocks and threads.
#pragma once

#include <cmath>
#include <cstdint>

constexpr int THREADS = 256;  // per block

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "emulation.h"
#endif
#define DS_KFAC_DEVICE __device__ __forceinline__
#define DS_KFAC_BOTH __host__ __device__ __forceinline__
#define DS_KFAC_API extern "C" __attribute__((visibility("default")))

namespace ds_kfac {

#ifdef DS_KFAC_LAYERS
constexpr int LAYERS = DS_KFAC_LAYERS;  // small, so that tests need several launches
#else
constexpr int LAYERS = 512;  // from CUDA 12.1 on, a launch may have 32,764 bytes of arguments
#endif

// Tells which layer a block of threads works on. `first_block[i]` is the number of blocks of all
// layers before layer i.
template <class Layer>
struct Table {
    Layer layers[LAYERS];
    int first_block[LAYERS];
    int count;

    DS_KFAC_DEVICE int find(int block) const {
        // a layer without elements shares its first block with the next layer
        int low = 0;
        int high = count;
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

template <int i, class Op>
__device__ __forceinline__ void run_phases(const Op &op, typename Op::Shared &shared) {
    op.template phase<i>(shared, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
    if constexpr (i + 1 < Op::PHASES) {
        __syncthreads();
        run_phases<i + 1>(op, shared);
    }
}

template <class Op>
__global__ void __launch_bounds__(THREADS) run(const __grid_constant__ Op op) {
    __shared__ typename Op::Shared shared;
    run_phases<0>(op, shared);
}

template <class Op>
int launch(const Op &op, int64_t blocks, void *stream) {
    static_assert(sizeof(Op) <= 32764, "a launch carries no more");
    if (blocks == 0) return cudaSuccess;
    if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
    void *arguments[] = {const_cast<Op *>(&op)};
    return cudaLaunchKernel(reinterpret_cast<const void *>(&run<Op>),
                            dim3(static_cast<unsigned>(blocks)), dim3(THREADS), arguments, 0,
                            static_cast<cudaStream_t>(stream));
}

#endif

// Launches `op` over `count` layers, in as few launches as their number allows. `layer_of(i)`
// describes layer i.
template <class Op, class LayerOf>
int launch_layers(Op op, int count, LayerOf layer_of, void *stream) {
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

// Dtypes of messages. Numbers are rounded to nearest even, as torch does.
enum Kind { FP32 = 0, BF16 = 1, FP16 = 2 };

DS_KFAC_DEVICE void store(float *to, float x) { *to = x; }
DS_KFAC_DEVICE void store(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }
DS_KFAC_DEVICE void store(__half *to, float x) { *to = __float2half_rn(x); }
DS_KFAC_DEVICE float load(const float *from) { return *from; }
DS_KFAC_DEVICE float load(const __nv_bfloat16 *from) { return __bfloat162float(*from); }
DS_KFAC_DEVICE float load(const __half *from) { return __half2float(*from); }

// These are never fused into a multiply-add, so that results equal torch's bit for bit.
DS_KFAC_DEVICE float add(float x, float y) { return __fadd_rn(x, y); }
DS_KFAC_DEVICE float multiply(float x, float y) { return __fmul_rn(x, y); }
DS_KFAC_DEVICE float divide(float x, float y) { return __fdiv_rn(x, y); }

DS_KFAC_DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Index arithmetic of a packed lower triangle: element (row, column), column <= row, lies at
// row(row+1)/2 + column.
//
// Largest dim for which row_of is exact. At the first element of a row, the root is 2 row + 1 and
// is never rounded to less. Near the end of a row it may be rounded to the next row's root, which
// row_of corrects. All operations follow IEEE, so a test on the host is valid for the device, too.
constexpr int64_t MAX_DIM = int64_t(1) << 20;

DS_KFAC_BOTH int64_t packed_numel(int64_t dim) { return dim * (dim + 1) / 2; }

// The row of packed element `index` of a triangle up to MAX_DIM wide.
DS_KFAC_BOTH int64_t row_of(int64_t index) {
    const float root = sqrtf(8.0f * static_cast<float>(index) + 1.0f);
    const int64_t row = static_cast<int64_t>((root - 1.0f) * 0.5f);
    return packed_numel(row) > index ? row - 1 : row;
}

// A position in a triangle that moves forward. The constructor needs a square root, and advance()
// needs only additions.
struct Cursor {
    int64_t row;
    int64_t column;

    DS_KFAC_BOTH explicit Cursor(int64_t index)
        : row(row_of(index)), column(index - packed_numel(row)) {}

    DS_KFAC_BOTH void advance(int64_t elements) {
        column += elements;
        while (column > row) {
            column -= row + 1;
            ++row;
        }
    }
};

}  // namespace ds_kfac
