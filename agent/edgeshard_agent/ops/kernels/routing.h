// The router of a mixture of experts: the experts of each row and their shares.
#pragma once

#include <limits>

#include "layers.h"

namespace {

// The positions of the `count` largest of some values, the largest first; of equal values the first ones.
ES_INLINE void largest_of(const float* values, int size, int count, int32_t* places) {
    int held = 0;
    for (int i = 0; i < size; i++) {
        if (held == count && !(values[i] > values[places[count - 1]])) continue;
        int at = held < count ? held++ : count - 1;
        for (; at > 0 && values[i] > values[places[at - 1]]; at--) places[at] = places[at - 1];
        places[at] = i;
    }
}

// Softmax in place. The memory after the values must hold LANES more.
ES_INLINE void softmax(float* values, int size) {
    float peak = values[0];
    for (int i = 1; i < size; i++) peak = values[i] > peak ? values[i] : peak;
    Float16 sums = {};
    for (int i = 0; i < size; i += LANES) {
        store(values + i, exp16(load<Float16>(values + i) - splat(peak)));
        for (int j = size; j < i + LANES; j++) values[j] = 0.0f;
        sums = sums + load<Float16>(values + i);
    }
    const Float16 total = splat(sum_lanes(sums));
    for (int i = 0; i < size; i += LANES) store(values + i, load<Float16>(values + i) / total);
}

// Leaves the values of the `kept_groups` groups whose best two are largest together; the others are minus infinity.
ES_INLINE void keep_best_groups(const Routing& r, float* ranked) {
    float sums[MOST_EXPERTS];
    int32_t kept[MOST_EXPERTS];
    const int size = r.experts / r.groups;
    for (int g = 0; g < r.groups; g++) {
        int32_t best[2];
        largest_of(ranked + g * size, size, 2, best);
        sums[g] = ranked[g * size + best[0]] + ranked[g * size + best[1]];
    }
    largest_of(sums, r.groups, r.kept_groups, kept);
    for (int g = 0; g < r.groups; g++) {
        bool is_kept = false;
        for (int k = 0; k < r.kept_groups; k++) is_kept = is_kept || kept[k] == g;
        for (int i = 0; i < size && !is_kept; i++) ranked[g * size + i] = -std::numeric_limits<float>::infinity();
    }
}

template <class T>
void route_row(const Routing& r, int64_t row) {
    const T* logits = static_cast<const T*>(r.logits) + row * r.experts;
    alignas(64) float scores[MOST_EXPERTS + LANES] = {}, ranked[MOST_EXPERTS];
    int32_t chosen[MOST_EXPERTS];
    for (int i = 0; i < r.experts; i += LANES) {
        const Float16 values = load_some(logits + i, r.experts - i);
        store(scores + i, r.sigmoid ? splat(1.0f) / (splat(1.0f) + exp16(-values)) : values);
    }
    if (!r.sigmoid) softmax(scores, r.experts);
    for (int i = 0; i < r.experts; i++) ranked[i] = r.correction ? scores[i] + r.correction[i] : scores[i];
    if (r.groups > 1) keep_best_groups(r, ranked);
    largest_of(ranked, r.experts, r.chosen, chosen);
    float total = 0.0f;
    for (int k = 0; k < r.chosen; k++) total += scores[chosen[k]];
    for (int k = 0; k < r.chosen; k++) {
        const float share = r.normalised ? scores[chosen[k]] / (total + LEAST_SHARES) : scores[chosen[k]];
        r.places[row * r.chosen + k] = chosen[k];
        r.shares[row * r.chosen + k] = share * r.scale;
    }
}

void route(const Routing& r, int32_t first, int32_t end) {
    for (int32_t row = first; row < end; row++) (r.element == ELEMENT_BF16 ? route_row<uint16_t> : route_row<float>)(r, row);
}

}  // namespace
