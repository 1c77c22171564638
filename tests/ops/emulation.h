// What csrc/cuda uses of CUDA, for a plain C++ compiler: numbers of 16 bits, and a launch as loops
// over blocks and threads. Compiled with -ffp-contract=off, or sums would differ from the GPU's.
#pragma once

#include <cstdint>
#include <cstring>

#define __host__
#define __device__
#define __forceinline__ inline

using cudaError_t = int;
using cudaStream_t = void *;

inline const char *cudaGetErrorName(cudaError_t) { return "emulation"; }
inline const char *cudaGetErrorString(cudaError_t) { return "the emulation has no errors"; }
inline cudaError_t cudaMemsetAsync(void *bytes, int value, size_t count, cudaStream_t) {
    std::memset(bytes, value, count);
    return 0;
}

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }

struct __nv_bfloat16 {
    uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const uint32_t bits = __float_as_uint(x);
    return {x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)
                   : static_cast<uint16_t>(0x7fc0)};
}
inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float whole;
    std::memcpy(&whole, &bits, sizeof whole);
    return whole;
}

struct __half {
    _Float16 number;
};
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __half2float(__half x) { return static_cast<float>(x.number); }

namespace ds_kfac {

template <int i, class Op>
void run_phases(const Op &op, typename Op::Shared &shared, int block) {
    // odd blocks backwards: an order of threads that the kernel must not rely on
    for (int thread = 0; thread < THREADS; ++thread)
        op.template phase<i>(shared, block, block % 2 ? THREADS - 1 - thread : thread);
    if constexpr (i + 1 < Op::PHASES) run_phases<i + 1>(op, shared, block);
}

template <class Op>
int launch(const Op &op, int64_t blocks, void *) {
    for (int64_t block = blocks - 1; block >= 0; --block) {
        typename Op::Shared shared;
        std::memset(static_cast<void *>(&shared), 0xff, sizeof shared);  // NaN
        run_phases<0>(op, shared, static_cast<int>(block));
    }
    return 0;
}

}  // namespace ds_kfac
