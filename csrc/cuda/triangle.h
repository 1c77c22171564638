// Index arithmetic of a packed lower triangle: element (row, column), column <= row, lies at row(row+1)/2 + column.
// Compiled for the device and, by any C++ compiler, for the host.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DS_KFAC_BOTH __host__ __device__ __forceinline__
#else
#define DS_KFAC_BOTH inline
#endif

namespace ds_kfac {

// Widest triangle for which row_of is exact. At a row's first element the rounded root is 2 row + 1, never less; only
// near a row's end it may be the next row's. IEEE operations, so the host's test holds for the device.
constexpr int64_t MAX_DIM = int64_t(1) << 20;

DS_KFAC_BOTH int64_t packed_numel(int64_t dim) { return dim * (dim + 1) / 2; }

// The row of packed element `index` of a triangle up to MAX_DIM wide.
DS_KFAC_BOTH int64_t row_of(int64_t index) {
    const float root = sqrtf(8.0f * static_cast<float>(index) + 1.0f);
    const int64_t row = static_cast<int64_t>((root - 1.0f) * 0.5f);
    return packed_numel(row) > index ? row - 1 : row;
}

// A place in a triangle that moves forward; after the first square root, additions only.
struct Cursor {
    int64_t row;
    int64_t column;

    DS_KFAC_BOTH explicit Cursor(int64_t index) : row(row_of(index)), column(index - packed_numel(row)) {}

    DS_KFAC_BOTH void advance(int64_t elements) {
        column += elements;
        while (column > row) {
            column -= row + 1;
            ++row;
        }
    }
};

}  // namespace ds_kfac
