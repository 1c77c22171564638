// Running averages of many factors in one call: count division, bias correction, and nothing of a bad batch.
// Cost: 16 bytes per packed element, the sum being read twice and the second time from a cache where it fits.

#include <algorithm>

#include "common.h"

namespace ds_kfac {
namespace {

// Integers, because comparisons of floats may be assumed away and do not vectorise with an early end.
bool finite(const float *values, Index count) {
    std::uint32_t found = 0;
#pragma omp simd reduction(| : found)
    for (Index i = 0; i < count; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        found |= static_cast<std::uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    }
    return found == 0;
}

}  // namespace
}  // namespace ds_kfac

using namespace ds_kfac;

extern "C" {

void ds_kfac_ema_update(Index items, float *const *averages, const float *const *sums, const Index *numels,
                        const float *const *counts, float *const *updates, const float *decays, unsigned char *used,
                        int threads) {
    for (Index item = 0; item < items; ++item) {
        const Index numel = numels[item], pieces = (numel + kPiece - 1) / kPiece;
        const float *sum = sums[item], count = *counts[item];
        float *average = averages[item];
        int bad = !(count > 0.0f);
        if (!bad) {
#pragma omp parallel for schedule(static) reduction(| : bad) num_threads(threads) if (pieces > 1)
            for (Index p = 0; p < pieces; ++p)
                bad |= !finite(sum + p * kPiece, std::min(kPiece, numel - p * kPiece));
        }
        used[item] = !bad;
        if (bad) continue;
        *updates[item] += 1.0f;
        const float keep = std::min(1.0f - 1.0f / std::max(*updates[item], 1.0f), decays[item]);
        const float weight = (1.0f - keep) / std::max(count, 1.0f);
#pragma omp parallel for schedule(static) num_threads(threads) if (pieces > 1)
        for (Index p = 0; p < pieces; ++p) {
            const Index end = std::min(numel, (p + 1) * kPiece);
#pragma omp simd
            for (Index i = p * kPiece; i < end; ++i) average[i] = keep * average[i] + weight * sum[i];
        }
    }
}
}
