// Shared by the CPU ops: packed triangles, the 16-bit formats, and how work is cut for threads.
//
// Every function has C linkage and takes plain pointers. Results do not depend on the number of threads: work is cut
// by size alone, and what several pieces add up is added in the order of the pieces.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace ds_kfac {

using Index = std::int64_t;

// Elements of a packed lower triangle, and where its row `rows` starts.
inline Index packed_numel(Index rows) { return rows * (rows + 1) / 2; }

enum class Dtype : int { fp32 = 0, bf16 = 1, fp16 = 2 };

struct Bf16 {
    std::uint16_t bits;
};
using Fp16 = _Float16;

inline float widen(float value) { return value; }
inline float widen(Fp16 value) { return static_cast<float>(value); }
inline float widen(Bf16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float value, float &out) { out = value; }
inline void narrow(float value, Fp16 &out) { out = static_cast<Fp16>(value); }
// To nearest, ties to even; every NaN becomes the quiet one.
inline void narrow(float value, Bf16 &out) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Elements of one piece of work: a few microseconds, and small enough for the second-level cache.
constexpr Index kPiece = 1 << 15;

// Rows begin..end of one of several triangles.
struct Piece {
    Index item, begin, end;
};

inline std::vector<Piece> pieces_of(Index items, const Index *dims) {
    std::vector<Piece> pieces;
    for (Index item = 0; item < items; ++item)
        for (Index begin = 0, end; begin < dims[item]; begin = end) {
            end = begin + 1;
            while (end < dims[item] && packed_numel(end + 1) - packed_numel(begin) <= kPiece) ++end;
            pieces.push_back({item, begin, end});
        }
    return pieces;
}

}  // namespace ds_kfac
