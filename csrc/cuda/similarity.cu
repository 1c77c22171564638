// Norms for adaptive refresh of many factors: how large each is, and how far from where it was. Two launches. Every
// sum is in a fixed order, so results repeat.
#include "launch.h"

namespace ds_kfac {

constexpr int NORMS = 3;

struct Compared {
    const float *now;      // [numel]
    const float *before;   // [numel] or null
    const float *earlier;  // [numel] or null
    int64_t numel;
    int64_t block;    // width of the diagonal blocks whose triangles follow each other
    int64_t partial;  // where the layer's partial sums begin, one [NORMS] per block of threads
    int index;        // of the layer in the result
};

struct Sums {
    float of[NORMS][THREADS];

    DS_KFAC_DEVICE void set(int thread, const float (&sums)[NORMS]) {
        DS_KFAC_UNROLL
        for (int norm = 0; norm < NORMS; ++norm) of[norm][thread] = sums[norm];
    }

    // Halves what is to be added up: phase 1 leaves THREADS / 2 sums, phase 8 one.
    template <int PHASE> DS_KFAC_DEVICE void halve(int thread) {
        constexpr int LEFT = THREADS >> PHASE;
        if (thread >= LEFT) return;
        DS_KFAC_UNROLL
        for (int norm = 0; norm < NORMS; ++norm) of[norm][thread] += of[norm][thread + LEFT];
    }
};

constexpr int HALVINGS = 8;
static_assert(THREADS == 1 << HALVINGS, "one sum is left");

// Squares of a stretch of packed elements; off the diagonal each stands for two.
struct SumSquares {
    static constexpr int PHASES = HALVINGS + 1;
    static constexpr int ITEMS = 32;
    static constexpr int AT_ONCE = 8;  // loads of each of the three in flight
    using Shared = Sums;

    float *partials;
    Table<Compared> table;

    static DS_KFAC_BOTH int64_t blocks(const Compared &layer) { return blocks_for(layer.numel, ITEMS * THREADS); }

    template <int PHASE> DS_KFAC_DEVICE void phase(Shared &shared, int block, int thread) const {
        if constexpr (PHASE > 0) shared.template halve<PHASE>(thread);
        const int index = PHASE == 0 || PHASE == HALVINGS ? table.find(block) : 0;
        const Compared &layer = table.layers[index];
        const int64_t place = block - table.first_block[index];
        if constexpr (PHASE == 0) read(shared, layer, place * (ITEMS * THREADS) + thread, thread);
        if (PHASE == HALVINGS && thread == 0)
            for (int norm = 0; norm < NORMS; ++norm)
                partials[(layer.partial + place) * NORMS + norm] = shared.of[norm][0];
    }

    DS_KFAC_DEVICE void read(Shared &shared, const Compared &layer, int64_t first, int thread) const {
        float sums[NORMS] = {0.0f, 0.0f, 0.0f};
        if (first < layer.numel) {
            BlockCursor cursor(first, layer.block);
            for (int64_t start = first; start < layer.numel; start += AT_ONCE * THREADS) {
                if (start >= first + ITEMS * THREADS) break;
                add_squares(sums, layer, cursor, start);
            }
        }
        shared.set(thread, sums);
    }

    DS_KFAC_DEVICE void add_squares(float (&sums)[NORMS], const Compared &layer, BlockCursor &cursor,
                                    int64_t start) const {
        float values[NORMS][AT_ONCE];
        DS_KFAC_UNROLL
        for (int i = 0; i < AT_ONCE; ++i) {
            const int64_t element = start + i * THREADS;
            const bool inside = element < layer.numel;
            values[0][i] = inside ? layer.now[element] : 0.0f;
            values[1][i] = inside && layer.before ? layer.before[element] : 0.0f;
            values[2][i] = inside && layer.earlier ? layer.earlier[element] : 0.0f;
        }
        DS_KFAC_UNROLL
        for (int i = 0; i < AT_ONCE; ++i) {
            const float now = values[0][i], changed = now - values[1][i], drifted = now - values[2][i];
            const float weight = cursor.on_diagonal() ? 1.0f : 2.0f;
            sums[0] += weight * now * now;
            sums[1] += weight * changed * changed;
            sums[2] += weight * drifted * drifted;
            cursor.advance(THREADS);
        }
    }
};

// norms[layer] = roots of the partial sums; NaN where there is nothing to compare with.
struct Norms {
    static constexpr int PHASES = HALVINGS + 1;
    using Shared = Sums;

    const float *partials;
    float *norms;
    Table<Compared> table;

    static int64_t blocks(const Compared &) { return 1; }

    template <int PHASE> DS_KFAC_DEVICE void phase(Shared &shared, int block, int thread) const {
        if constexpr (PHASE > 0) shared.template halve<PHASE>(thread);
        const Compared &layer = table.layers[block];
        if constexpr (PHASE == 0) {
            float sums[NORMS] = {0.0f, 0.0f, 0.0f};
            const int64_t stop = layer.partial + SumSquares::blocks(layer);
            for (int64_t place = layer.partial + thread; place < stop; place += THREADS)
                for (int norm = 0; norm < NORMS; ++norm) sums[norm] += partials[place * NORMS + norm];
            shared.set(thread, sums);
        }
        if (PHASE == HALVINGS && thread == 0) {
            const bool empty = layer.numel == 0;  // has no address either
            const bool known[NORMS] = {true, empty || layer.before, empty || layer.earlier};
            for (int norm = 0; norm < NORMS; ++norm)
                norms[layer.index * NORMS + norm] = known[norm] ? sqrtf(shared.of[norm][0]) : NAN;
        }
    }
};

}  // namespace ds_kfac

using namespace ds_kfac;

// Elements of the scratch that ds_kfac_cuda_similarity needs.
DS_KFAC_API int64_t ds_kfac_cuda_similarity_scratch(int count, const int64_t *numels) {
    int64_t elements = 0;
    for (int i = 0; i < count; ++i) elements += NORMS * blocks_for(numels[i], SumSquares::ITEMS * THREADS);
    return elements;
}

// norms[i] = |now|, |now - before|, |now - earlier| of symmetric matrices kept as packed triangles of diagonal blocks,
// each `blocks[i]` wide, the last maybe smaller. `befores[i]` and `earliers[i]` may be null: NaN, or 0 of an empty one.
// Returns a cudaError_t.
DS_KFAC_API int ds_kfac_cuda_similarity(float *norms, float *scratch, int count, const void *const *nows,
                                        const void *const *befores, const void *const *earliers, const int64_t *numels,
                                        const int64_t *blocks, void *stream) {
    int64_t partial = 0;
    const auto layer_of = [&](int i) {
        if (i == 0) partial = 0;
        const Compared layer{static_cast<const float *>(nows[i]),
                             static_cast<const float *>(befores[i]),
                             static_cast<const float *>(earliers[i]),
                             numels[i],
                             blocks[i],
                             partial,
                             i};
        partial += SumSquares::blocks(layer);
        return layer;
    };
    SumSquares squares{};
    squares.partials = scratch;
    if (const int error = launch_layers(squares, count, layer_of, stream)) return error;
    Norms roots{};
    roots.partials = scratch;
    roots.norms = norms;
    return launch_layers(roots, count, layer_of, stream);
}
