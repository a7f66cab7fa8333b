// Cosines and sines of a rotary embedding, from additions and multiplications of doubles only. IEEE 754 defines each of
// them to the last bit, and none is fused, so every processor and compiler gives the same bits.
#pragma once

#include <initializer_list>

#include "doubles.h"
#include "layers.h"

namespace {

struct Turn {
    Doubles cos, sin;
};

// The cosine and the sine of x, for magnitudes up to 2^26 within 1e-15. x less n quarter turns is exact up to the last
// step: the first two parts of pi / 2 have 27 bits, so that their products with n have at most 53.
ES_INLINE Turn turn_of(Doubles x) {
    const Doubles magic = splat_double(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    const Doubles shifted = x * 0x1.45f306dc9c883p-1 + magic;
    const Longs quarter = (Longs)shifted;
    const Doubles n = shifted - magic;
    Doubles rest = x - n * 0x1.921fb54p+0;
    rest = rest - n * 0x1.10b46p-30;
    rest = rest - n * 0x1.1a62633145c07p-54;
    const Doubles z = rest * rest;
    // Taylor's polynomials; the first terms left out are below 6e-17 on [-pi / 4, pi / 4].
    Doubles s = splat_double(-1.0 / 1307674368000);
    for (const double term : {1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6})
        s = s * z + term;
    s = s * z * rest + rest;
    Doubles c = splat_double(1.0 / 20922789888000);
    for (const double term : {-1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5})
        c = c * z + term;
    c = c * z + 1.0;
    const Longs odd = -(quarter & 1);
    const Longs sine = (odd & (Longs)c) | (~odd & (Longs)s), cosine = (odd & (Longs)s) | (~odd & (Longs)c);
    return {(Doubles)(cosine ^ (((quarter + 1) & 2) << 62)), (Doubles)(sine ^ ((quarter & 2) << 62))};
}

// Of one position. Angles, then cosines and sines, are rounded to float32 as in transformers, and the products with
// `scaling` once more. Both halves of `cos` and `sin`, [2 * pairs], are alike.
template <class T>
void angles_row(float position, const float* frequencies, int pairs, float scaling, T* cos, T* sin) {
    for (int i = 0; i < pairs; i += LANES) {
        const int left = pairs - i;
        float angles[LANES];
        double cosines[LANES], sines[LANES];
        store(angles, load_some(frequencies + i, left) * splat(position));
        for (int j = 0; j < LANES; j += DOUBLES) {
            const Turn turn = turn_of(load_doubles(angles + j));
            std::memcpy(cosines + j, &turn.cos, sizeof(Doubles));
            std::memcpy(sines + j, &turn.sin, sizeof(Doubles));
        }
        const Float16 c = load_as_float(cosines) * splat(scaling), s = load_as_float(sines) * splat(scaling);
        for (T* half : {cos + i, cos + pairs + i}) store_some(half, c, left);
        for (T* half : {sin + i, sin + pairs + i}) store_some(half, s, left);
    }
}

void angles(const Angles& a, int32_t row) {
    const float position = static_cast<float>(a.positions[row]);
    const int64_t at = int64_t{row} * 2 * a.pairs;
    if (a.element == ELEMENT_BF16)
        angles_row(position, a.frequencies, a.pairs, a.scaling, static_cast<uint16_t*>(a.cos) + at,
                   static_cast<uint16_t*>(a.sin) + at);
    else
        angles_row(position, a.frequencies, a.pairs, a.scaling, static_cast<float*>(a.cos) + at,
                   static_cast<float*>(a.sin) + at);
}

}  // namespace
