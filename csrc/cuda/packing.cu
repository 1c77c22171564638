// Packs symmetric matrices of many layers into one flat buffer of lower triangles, in a message's
// dtype, and unpacks them again.
#include "launch.h"

namespace ds_kfac {

struct Triangle {
    float *matrix;   // [dim, dim] with contiguous rows
    int64_t stride;  // elements from the start of a row to the start of the next
    int64_t start;   // index of the triangle's first element in the flat buffer
    int64_t dim;
};

// Neighbouring threads take neighbouring packed elements, so that whole sectors are read and
// written.
template <class Number>
struct Pack {
    static constexpr int PHASES = 1;
    static constexpr int ITEMS = 16;  // loads in flight per thread
    using Shared = Nothing;

    Number *packed;
    Table<Triangle> table;

    static int64_t blocks(const Triangle &layer) {
        return blocks_for(packed_numel(layer.dim), ITEMS * THREADS);
    }

    template <int>
    DS_KFAC_DEVICE void phase(Shared &, int block, int thread) const {
        const int index = table.find(block);
        const Triangle layer =
            table.layers[index];  // a copy: the table would be read again for every element
        const int64_t numel = packed_numel(layer.dim);
        const int64_t first =
            int64_t(block - table.first_block[index]) * (ITEMS * THREADS) + thread;
        if (first >= numel) return;
        Cursor cursor(first);
        float values[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const bool inside = first + i * THREADS < numel;
            values[i] = inside ? layer.matrix[cursor.row * layer.stride + cursor.column] : 0.0f;
            cursor.advance(THREADS);
        }
        Number *to = packed + layer.start + first;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (first + i * THREADS < numel) store(to + i * THREADS, values[i]);
    }
};

// One block per tile of the lower triangle. The tile's mirror image goes through shared memory, so
// that it is also written row by row.
template <class Number>
struct Unpack {
    static constexpr int PHASES = 2;
    static constexpr int TILE = 64;
    static constexpr int STEP = THREADS / TILE;  // rows of a tile that the block reads at once
    struct Shared {
        float tile[TILE][TILE + 1];  // one more, so that a column's elements lie in different banks
    };

    const Number *packed;
    Table<Triangle> table;

    static int64_t blocks(const Triangle &layer) {
        return packed_numel(blocks_for(layer.dim, TILE));
    }

    template <int PHASE>
    DS_KFAC_DEVICE void phase(Shared &shared, int block, int thread) const {
        const int index = table.find(block);
        const Triangle layer =
            table.layers[index];  // a copy: the table would be read again for every element
        const Cursor tile(block - table.first_block[index]);
        const int64_t row = tile.row * TILE;
        const int64_t column = tile.column * TILE;
        const int x = thread % TILE;
        const int y = thread / TILE;
        if constexpr (PHASE == 0)
            read(shared, layer, row + y, column + x, y, x);
        else
            mirror(shared, layer, column + y, row + x, y, x);
    }

    // Offsets inside a tile fit into 32 bits: it has up to 64 rows of at most 2^20 elements. The
    // packed rows r and r + d, with d even, begin d (2 r + d + 1) / 2 elements apart.
    DS_KFAC_DEVICE void read(Shared &shared, const Triangle &layer, int64_t row, int64_t column,
                             int y, int x) const {
        const int r = static_cast<int>(row), c = static_cast<int>(column),
                  stride = static_cast<int>(layer.stride);
        const int dim = static_cast<int>(layer.dim);
        const Number *from = packed + layer.start + packed_numel(row) + column;
        float *to = layer.matrix + row * layer.stride + column;
        float values[TILE / STEP];
#pragma unroll
        for (int i = 0; i < TILE / STEP; ++i) {
            const int d = i * STEP;
            values[i] = r + d < dim && c <= r + d ? load(from + d * (2 * r + d + 1) / 2) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < TILE / STEP; ++i) {
            const int d = i * STEP;
            if (r + d < dim && c <= r + d) to[d * stride] = values[i];
            shared.tile[y + d][x] = values[i];
        }
    }

    // Writes the tile's mirror image, above the diagonal.
    DS_KFAC_DEVICE void mirror(const Shared &shared, const Triangle &layer, int64_t row,
                               int64_t column, int y, int x) const {
        const int r = static_cast<int>(row), c = static_cast<int>(column),
                  stride = static_cast<int>(layer.stride);
        if (column >= layer.dim) return;
        float *to = layer.matrix + row * layer.stride + column;
#pragma unroll
        for (int i = 0; i < TILE / STEP; ++i) {
            const int d = i * STEP;
            if (r + d < c) to[d * stride] = shared.tile[x][y + d];
        }
    }
};

template <template <class> class Op>
int over_triangles(void *packed, int kind, int count, void *const *matrices, const int64_t *strides,
                   const int64_t *starts, const int64_t *dims, void *stream) {
    const auto layer_of = [&](int i) {
        return Triangle{static_cast<float *>(matrices[i]), strides[i], starts[i], dims[i]};
    };
    using Bf16 = __nv_bfloat16;
    switch (kind) {
        case FP32:
            return launch_layers(Op<float>{static_cast<float *>(packed), {}}, count, layer_of,
                                 stream);
        case BF16:
            return launch_layers(Op<Bf16>{static_cast<Bf16 *>(packed), {}}, count, layer_of,
                                 stream);
        default:
            return launch_layers(Op<__half>{static_cast<__half *>(packed), {}}, count, layer_of,
                                 stream);
    }
}

}  // namespace ds_kfac

using namespace ds_kfac;

// packed[starts[i] + r(r+1)/2 + c] = matrices[i][r, c], c <= r, in the dtype `kind` (see Kind).
// Rows of matrix i lie strides[i] elements apart. Returns a cudaError_t.
DS_KFAC_API int ds_kfac_cuda_pack(void *packed, int kind, int count, void *const *matrices,
                                  const int64_t *strides, const int64_t *starts,
                                  const int64_t *dims, void *stream) {
    return over_triangles<Pack>(packed, kind, count, matrices, strides, starts, dims, stream);
}

// The inverse of ds_kfac_cuda_pack, with the mirror image above the diagonal. Writes every element
// of every matrix.
DS_KFAC_API int ds_kfac_cuda_unpack(void *packed, int kind, int count, void *const *matrices,
                                    const int64_t *strides, const int64_t *starts,
                                    const int64_t *dims, void *stream) {
    return over_triangles<Unpack>(packed, kind, count, matrices, strides, starts, dims, stream);
}
