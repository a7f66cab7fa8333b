// A softmax whose scores come tile by tile: what a row has seen, and how the next tile is merged into it.
#pragma once

#include <cstdint>

#include "layers.h"
#include "vectors.h"

namespace {

// The attention weights of a vector of keys, all between 0 and 1.
ES_INLINE void store_weights(float* address, Float16 weights) { store(address, weights); }
ES_INLINE void store_weights(uint16_t* address, Float16 weights) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), (__m256i)_mm512_cvtneps_pbh((__m512)weights));
#else
    store_bf16(address, weights);
#endif
}

// By what sums so far and those of the next tile are to be multiplied; one of the two is 1.
struct Shares {
    float old, added;
};

// What one row has seen: the largest score, and the sum of weights relative to it.
struct Seen {
    float maximum, total;

    Shares add(Seen tile) {
        if (tile.maximum <= maximum) {
            const float share = exp16(splat(tile.maximum - maximum))[0];
            total = tile.total * share + total;
            return {1.0f, share};
        }
        const float share = exp16(splat(maximum - tile.maximum))[0];
        total = total * share + tile.total;
        maximum = tile.maximum;
        return {share, 1.0f};
    }
};

ES_INLINE Float16 merged(Float16 sums, Float16 added, Shares shares) {
    if (shares.added == 1.0f) return fma16(sums, splat(shares.old), added);
    return fma16(added, splat(shares.added), sums);
}

}  // namespace
