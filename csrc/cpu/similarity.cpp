// How much factors have changed: Frobenius norms of many symmetric matrices and their differences in one pass.
// Cost: 12 bytes per packed element. Rows are added up in fp32, everything above in fp64.

#include <algorithm>
#include <cmath>

#include "common.h"

using namespace ds_kfac;

extern "C" {

// A block is one triangle; its three norms' squares are added to those of its factor.
void ds_kfac_similarity(Index blocks, const float *const *now, const float *const *before,
                        const float *const *earlier, const Index *dims, const Index *factor, Index factors, float *out,
                        int threads) {
    const auto pieces = pieces_of(blocks, dims);
    std::vector<double> partial(3 * pieces.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (pieces.size() > 1)
    for (std::size_t p = 0; p < pieces.size(); ++p) {
        const auto [block, begin, end] = pieces[p];
        double sums[3] = {0, 0, 0};
        for (Index row = begin; row < end; ++row) {
            const Index start = packed_numel(row);
            const float *a = now[block] + start, *b = before[block] + start, *c = earlier[block] + start;
            float s0 = 0, s1 = 0, s2 = 0;
#pragma omp simd reduction(+ : s0, s1, s2)
            for (Index i = 0; i < row; ++i) {
                const float d1 = a[i] - b[i], d2 = a[i] - c[i];
                s0 += a[i] * a[i];
                s1 += d1 * d1;
                s2 += d2 * d2;
            }
            const double x = a[row], d1 = x - b[row], d2 = x - c[row];  // off the diagonal elements count twice
            sums[0] += 2.0 * s0 + x * x;
            sums[1] += 2.0 * s1 + d1 * d1;
            sums[2] += 2.0 * s2 + d2 * d2;
        }
        std::copy(sums, sums + 3, &partial[3 * p]);
    }
    std::vector<double> total(static_cast<std::size_t>(3 * factors), 0.0);
    for (std::size_t p = 0; p < pieces.size(); ++p)
        for (Index k = 0; k < 3; ++k) total[3 * factor[pieces[p].item] + k] += partial[3 * p + k];
    for (Index i = 0; i < 3 * factors; ++i) out[i] = static_cast<float>(std::sqrt(total[i]));
}
}
