// Numbers as they travel: fp32, bf16 or fp16, rounded to nearest even as torch does.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DS_KFAC_DEVICE __device__ __forceinline__
#else
#define DS_KFAC_DEVICE inline
#endif

namespace ds_kfac {

enum Kind { FP32 = 0, BF16 = 1, FP16 = 2 };

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};

#ifdef __CUDACC__

DS_KFAC_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
DS_KFAC_DEVICE void store(float *to, float x) { *to = x; }
DS_KFAC_DEVICE void store(Bf16 *to, float x) { to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
DS_KFAC_DEVICE void store(Fp16 *to, float x) { to->bits = __half_as_ushort(__float2half_rn(x)); }
DS_KFAC_DEVICE float load(const float *from) { return *from; }
DS_KFAC_DEVICE float load(const Bf16 *from) { return __bfloat162float(__ushort_as_bfloat16(from->bits)); }
DS_KFAC_DEVICE float load(const Fp16 *from) { return __half2float(__ushort_as_half(from->bits)); }

// Never fused into a multiply-add, so that sums are torch's, bit for bit.
DS_KFAC_DEVICE float add(float x, float y) { return __fadd_rn(x, y); }
DS_KFAC_DEVICE float multiply(float x, float y) { return __fmul_rn(x, y); }
DS_KFAC_DEVICE float divide(float x, float y) { return __fdiv_rn(x, y); }

#else  // the emulation's; compiled with -ffp-contract=off

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline void store(float *to, float x) { *to = x; }
inline void store(Bf16 *to, float x) {
    const uint32_t bits = bits_of(x);
    to->bits = x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}
inline void store(Fp16 *to, float x) {
    const _Float16 half = static_cast<_Float16>(x);
    std::memcpy(&to->bits, &half, sizeof half);
}
inline float load(const float *from) { return *from; }
inline float load(const Bf16 *from) {
    const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float load(const Fp16 *from) {
    _Float16 half;
    std::memcpy(&half, &from->bits, sizeof half);
    return static_cast<float>(half);
}
inline float add(float x, float y) { return x + y; }
inline float multiply(float x, float y) { return x * y; }
inline float divide(float x, float y) { return x / y; }

#endif

DS_KFAC_DEVICE bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

}  // namespace ds_kfac
