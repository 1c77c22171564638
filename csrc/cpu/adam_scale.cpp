// Adam's step of one matrix: both moments and the direction in one pass. Cost: 24 bytes per element.

#include <algorithm>
#include <cmath>

#include "common.h"

namespace ds_kfac {
namespace {

// As torch.lerp: from the end that is nearer to `decay`, so that a decay of 0 or 1 gives one of them exactly.
struct Lerp {
    float weight;
    bool from_old;
    explicit Lerp(float decay) : weight(decay >= 0.5f ? 1.0f - decay : -decay), from_old(decay >= 0.5f) {}
    float operator()(float now, float old) const { return (from_old ? old : now) - (old - now) * weight; }
};

// What the moments and, with nesterov, x are multiplied by: bias corrections in fp64 of the betas that `Lerp` uses.
struct Factors {
    float first, second, x;
};

Factors factors_of(double steps, double beta1, double beta2, bool nesterov) {
    const double now = 1 / (1 - std::pow(beta1, steps)), second = 1 / (1 - std::pow(beta2, steps));
    const double first = nesterov ? beta1 / (1 - std::pow(beta1, steps + 1)) : now;
    return {static_cast<float>(first), static_cast<float>(second), static_cast<float>((1 - beta1) * now)};
}

template <bool usable, bool nesterov>
void step(const float *x, const float *first, const float *second, float *direction, float *new_first,
          float *new_second, Index numel, Lerp fold1, Lerp fold2, Factors by, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (numel > kPiece)
    for (Index begin = 0; begin < numel; begin += kPiece) {
        const Index end = std::min(begin + kPiece, numel);
#pragma omp simd
        for (Index i = begin; i < end; ++i) {
            const float now = x[i];
            const float m = usable ? fold1(now, first[i]) : first[i];
            const float v = usable ? fold2(now * now, second[i]) : second[i];
            const float numerator = nesterov ? m * by.first + now * by.x : m * by.first;
            new_first[i] = m;
            new_second[i] = v;
            direction[i] = numerator / (std::sqrt(v * by.second) + eps);
        }
    }
}

}  // namespace
}  // namespace ds_kfac

using namespace ds_kfac;

extern "C" {

// updates: before this step.
void ds_kfac_adam_scale(const float *x, const float *first, const float *second, float *direction, float *new_first,
                        float *new_second, Index numel, float updates, int usable, float beta1, float beta2, float eps,
                        int nesterov, int threads) {
    const Factors by = factors_of(std::max(updates + (usable ? 1.0f : 0.0f), 1.0f), beta1, beta2, nesterov);
    auto work = usable ? (nesterov ? step<true, true> : step<true, false>)
                       : (nesterov ? step<false, true> : step<false, false>);
    work(x, first, second, direction, new_first, new_second, numel, Lerp(beta1), Lerp(beta2), by, eps, threads);
}
}
