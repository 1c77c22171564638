// How much factors have changed: Frobenius norms of many symmetric matrices and their differences in one pass.
// Cost: 12 bytes per packed element. Rows are added up in fp32, everything above in fp64.

#include <algorithm>
#include <cmath>
#include <limits>

#include "common.h"

using namespace ds_kfac;

namespace {

// Rows begin..end of a triangle that starts at `offset` in factor `item`; or elements, if all of them are a diagonal's.
struct Part {
    Index item, offset, begin, end;
    bool diagonal;
};

// Diagonal blocks of width `block`, the last of them the rest; 1 is a diagonal, 0 is nothing.
void add_parts(std::vector<Part> &parts, Index item, Index dim, Index block) {
    if (block == 1) {
        for (Index begin = 0; begin < dim; begin += kPiece)
            parts.push_back({item, 0, begin, std::min(begin + kPiece, dim), true});
        return;
    }
    Index offset = 0;
    for (Index first = 0; block > 0 && first < dim; first += block) {
        const Index width = std::min(block, dim - first);
        for (const auto &piece : pieces_of(1, &width)) parts.push_back({item, offset, piece.begin, piece.end, false});
        offset += packed_numel(width);
    }
}

struct Squares {
    float of[3] = {0, 0, 0};
};

// Of elements begin..end; what is not there is taken to be equal.
Squares squares(const float *now, const float *before, const float *earlier, Index begin, Index end) {
    float s0 = 0, s1 = 0, s2 = 0;
#pragma omp simd reduction(+ : s0, s1, s2)
    for (Index i = begin; i < end; ++i) {
        const float d1 = now[i] - before[i], d2 = now[i] - earlier[i];
        s0 += now[i] * now[i];
        s1 += d1 * d1;
        s2 += d2 * d2;
    }
    return {{s0, s1, s2}};
}

}  // namespace

extern "C" {

// `befores[i]` and `earliers[i]` may be null: their norms are NaN, or 0 of an empty one.
void ds_kfac_similarity(Index factors, const float *const *nows, const float *const *befores,
                        const float *const *earliers, const Index *dims, const Index *blocks, float *out,
                        int threads) {
    std::vector<Part> parts;
    for (Index i = 0; i < factors; ++i) add_parts(parts, i, dims[i], blocks[i]);
    std::vector<double> partial(3 * parts.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parts.size() > 1)
    for (std::size_t p = 0; p < parts.size(); ++p) {
        const auto [item, offset, begin, end, diagonal] = parts[p];
        const float *now = nows[item], *before = befores[item] ? befores[item] : now;
        const float *earlier = earliers[item] ? earliers[item] : now;
        double sums[3] = {0, 0, 0};
        if (diagonal) {
            const auto found = squares(now, before, earlier, begin, end);
            for (int k = 0; k < 3; ++k) sums[k] = found.of[k];
        } else {
            for (Index row = begin; row < end; ++row) {  // off the diagonal elements count twice
                const Index start = offset + packed_numel(row), last = start + row;
                const auto found = squares(now, before, earlier, start, last);
                const double x = now[last], values[3] = {x, x - before[last], x - earlier[last]};
                for (int k = 0; k < 3; ++k) sums[k] += 2.0 * found.of[k] + values[k] * values[k];
            }
        }
        std::copy(sums, sums + 3, &partial[3 * p]);
    }
    std::vector<double> total(static_cast<std::size_t>(3 * factors), 0.0);
    for (std::size_t p = 0; p < parts.size(); ++p)
        for (Index k = 0; k < 3; ++k) total[3 * parts[p].item + k] += partial[3 * p + k];
    for (Index i = 0; i < factors; ++i) {
        const bool empty = dims[i] == 0 || blocks[i] == 0;  // has no address either
        const bool known[3] = {true, empty || befores[i], empty || earliers[i]};
        for (Index k = 0; k < 3; ++k)
            out[3 * i + k] = known[k] ? static_cast<float>(std::sqrt(total[3 * i + k]))
                                      : std::numeric_limits<float>::quiet_NaN();
    }
}
}
