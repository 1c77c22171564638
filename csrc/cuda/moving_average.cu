// Updates running averages of many factors from their batch sums, in place. It needs three launches
// for up to LAYERS factors. Its arithmetic has the same order as the specification in plain torch,
// so results are equal bit for bit.
#include "launch.h"

namespace ds_kfac {

struct Average {
    float *average;    // [numel]
    const float *sum;  // [numel]
    int64_t numel;
    const float *count;  // scalar: number of summands in `sum`
    float *updates;      // scalar: number of batches averaged so far
    float decay;         // weight of the past
    int index;           // the layer's place in `used` and `weights`
};

constexpr int ITEMS = 16;

DS_KFAC_DEVICE int64_t first_element(const Table<Average> &table, int index, int block,
                                     int thread) {
    return int64_t(block - table.first_block[index]) * (ITEMS * THREADS) + thread;
}

// Sets used[layer] = false if one of the layer's sums is not finite. All threads that write it
// write the same value.
struct CheckSums {
    static constexpr int PHASES = 1;
    using Shared = Nothing;

    uint8_t *used;
    Table<Average> table;

    static int64_t blocks(const Average &layer) { return blocks_for(layer.numel, ITEMS * THREADS); }

    template <int>
    DS_KFAC_DEVICE void phase(Shared &, int block, int thread) const {
        const int index = table.find(block);
        const Average &layer = table.layers[index];
        const int64_t first = first_element(table, index, block, thread);
        bool finite = true;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            finite &=
                first + i * THREADS >= layer.numel || is_finite(layer.sum[first + i * THREADS]);
        if (!finite) used[layer.index] = 0;
    }
};

// Counts the batch if it is usable. weights[layer] = the weight of the past: the smaller of 1 -
// 1/updates and decay.
struct CountBatches {
    static constexpr int PHASES = 1;
    using Shared = Nothing;

    uint8_t *used;
    float *weights;
    Table<Average> table;

    static int64_t blocks(const Average &) { return 1; }

    template <int>
    DS_KFAC_DEVICE void phase(Shared &, int block, int thread) const {
        if (thread != 0) return;
        const Average &layer = table.layers[table.find(block)];
        const bool usable = used[layer.index] && *layer.count > 0;
        const float updates = *layer.updates + (usable ? 1.0f : 0.0f);
        const float growing = add(1.0f, -divide(1.0f, updates < 1.0f ? 1.0f : updates));
        *layer.updates = updates;
        used[layer.index] = usable;
        weights[layer.index] = growing < layer.decay ? growing : layer.decay;
    }
};

// average = r average + (1 - r) sum / count if the batch is used. r is weights[layer].
struct TakeIn {
    static constexpr int PHASES = 1;
    using Shared = Nothing;

    const uint8_t *used;
    const float *weights;
    Table<Average> table;

    static int64_t blocks(const Average &layer) { return blocks_for(layer.numel, ITEMS * THREADS); }

    template <int>
    DS_KFAC_DEVICE void phase(Shared &, int block, int thread) const {
        const int index = table.find(block);
        const Average &layer = table.layers[index];
        if (!used[layer.index]) return;
        const float keep = weights[layer.index];
        const float take = add(1.0f, -keep);
        const float count = *layer.count < 1.0f ? 1.0f : *layer.count;
        const int64_t first = first_element(table, index, block, thread);
        float averages[ITEMS], sums[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const bool inside = first + i * THREADS < layer.numel;
            averages[i] = inside ? layer.average[first + i * THREADS] : 0.0f;
            sums[i] = inside ? layer.sum[first + i * THREADS] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (first + i * THREADS < layer.numel)
                layer.average[first + i * THREADS] =
                    add(multiply(keep, averages[i]), multiply(take, divide(sums[i], count)));
    }
};

}  // namespace ds_kfac

using namespace ds_kfac;

// For each layer i: if its count is positive and all of its `numels[i]` sums are finite, folds sum
// / count into the average, adds 1 to updates and sets used[i]. Else leaves the layer unchanged and
// clears used[i]. `used` [count] and the scratch buffer `weights` [count] are on the device.
// Returns a cudaError_t.
DS_KFAC_API int ds_kfac_cuda_ema_update(uint8_t *used, float *weights, int count,
                                        void *const *averages, const void *const *sums,
                                        const int64_t *numels, const void *const *counts,
                                        void *const *updates, const float *decays, void *stream) {
    const auto layer_of = [&](int i) {
        return Average{static_cast<float *>(averages[i]),
                       static_cast<const float *>(sums[i]),
                       numels[i],
                       static_cast<const float *>(counts[i]),
                       static_cast<float *>(updates[i]),
                       decays[i],
                       i};
    };
    if (const int error =
            cudaMemsetAsync(used, 1, static_cast<size_t>(count), static_cast<cudaStream_t>(stream)))
        return error;
    if (const int error = launch_layers(CheckSums{used, {}}, count, layer_of, stream)) return error;
    if (const int error = launch_layers(CountBatches{used, weights, {}}, count, layer_of, stream))
        return error;
    return launch_layers(TakeIn{used, weights, {}}, count, layer_of, stream);
}

// Name and description of a returned cudaError_t.
DS_KFAC_API const char *ds_kfac_cuda_error_name(int error) {
    return cudaGetErrorName(static_cast<cudaError_t>(error));
}
DS_KFAC_API const char *ds_kfac_cuda_error_text(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}
