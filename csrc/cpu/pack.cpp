// Lower triangles of many matrices into and out of one flat buffer, with casts; one call for all layers.
// Cost: 4 + w bytes per packed element to pack, w + 8 to unpack, with w bytes on the wire. Bandwidth bound.

#include <algorithm>

#include "common.h"

namespace ds_kfac {
namespace {

constexpr Index kTile = 32;

template <class Wire>
void pack(Wire *out, Index items, const Index *starts, const float *const *matrices, const Index *strides,
          const Index *dims, int threads) {
    const auto pieces = pieces_of(items, dims);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (pieces.size() > 1)
    for (std::size_t p = 0; p < pieces.size(); ++p) {
        const auto [item, begin, end] = pieces[p];
        for (Index row = begin; row < end; ++row) {
            const float *source = matrices[item] + row * strides[item];
            Wire *target = out + starts[item] + packed_numel(row);
            for (Index column = 0; column <= row; ++column) narrow(source[column], target[column]);
        }
    }
}

// One strip of kTile rows: read once, written as rows, and tile by tile as columns.
template <class Wire>
void unpack_strip(const Wire *packed, float *out, Index dim, Index top, bool mirror) {
    const Index bottom = std::min(top + kTile, dim);
    for (Index row = top; row < bottom; ++row) {
        const Wire *source = packed + packed_numel(row);
        float *target = out + row * dim;
        for (Index column = 0; column <= row; ++column) target[column] = widen(source[column]);
        if (!mirror) std::fill(target + row + 1, target + dim, 0.0f);
    }
    if (!mirror) return;
    float tile[kTile][kTile];
    for (Index left = 0; left < bottom; left += kTile) {
        const Index right = std::min(left + kTile, bottom);
        for (Index row = top; row < bottom; ++row) {
            const Wire *source = packed + packed_numel(row);
            for (Index column = left; column < std::min(right, row + 1); ++column)
                tile[column - left][row - top] = widen(source[column]);
        }
        for (Index column = left; column < right; ++column) {
            const Index first = std::max(top, column + 1);
            if (first < bottom)
                std::memcpy(out + column * dim + first, &tile[column - left][first - top],
                            static_cast<std::size_t>(bottom - first) * sizeof(float));
        }
    }
}

template <class Wire>
void unpack(const Wire *packed, Index items, const Index *starts, float *const *matrices, const Index *dims,
            bool mirror, int threads) {
    std::vector<Piece> strips;
    for (Index item = 0; item < items; ++item)
        for (Index top = 0; top < dims[item]; top += kTile) strips.push_back({item, top, 0});
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (strips.size() > 4)
    for (std::size_t s = 0; s < strips.size(); ++s) {
        const Index item = strips[s].item;
        unpack_strip(packed + starts[item], matrices[item], dims[item], strips[s].begin, mirror);
    }
}

}  // namespace
}  // namespace ds_kfac

using namespace ds_kfac;

extern "C" {

void ds_kfac_pack(void *out, int dtype, Index items, const Index *starts, const float *const *matrices,
                  const Index *strides, const Index *dims, int threads) {
    switch (static_cast<Dtype>(dtype)) {
        case Dtype::fp32: return pack(static_cast<float *>(out), items, starts, matrices, strides, dims, threads);
        case Dtype::bf16: return pack(static_cast<Bf16 *>(out), items, starts, matrices, strides, dims, threads);
        case Dtype::fp16: return pack(static_cast<Fp16 *>(out), items, starts, matrices, strides, dims, threads);
    }
}

void ds_kfac_unpack(const void *packed, int dtype, Index items, const Index *starts, float *const *matrices,
                    const Index *dims, int mirror, int threads) {
    const bool both = mirror != 0;
    switch (static_cast<Dtype>(dtype)) {
        case Dtype::fp32:
            return unpack(static_cast<const float *>(packed), items, starts, matrices, dims, both, threads);
        case Dtype::bf16:
            return unpack(static_cast<const Bf16 *>(packed), items, starts, matrices, dims, both, threads);
        case Dtype::fp16:
            return unpack(static_cast<const Fp16 *>(packed), items, starts, matrices, dims, both, threads);
    }
}

// sum_P[of rows start..stop] += scale * lower part of block, the [stop - start, stop] rows of a product X^T X.
void ds_kfac_add_lower(float *sum, const float *block, Index start, Index stop, float scale, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (stop * (stop - start) > kPiece)
    for (Index row = start; row < stop; ++row) {
        const float *source = block + (row - start) * stop;
        float *target = sum + packed_numel(row);
#pragma omp simd
        for (Index column = 0; column <= row; ++column) target[column] += scale * source[column];
    }
}
}
