// Eight lanes of double, for what is summed over a whole vocabulary: one AVX-512 register, two of AVX2, four of NEON.
#pragma once

#include <limits>

#include "vectors.h"

namespace {

typedef double Double8 __attribute__((vector_size(64), aligned(8), may_alias));
typedef int64_t Long8 __attribute__((vector_size(64), aligned(8), may_alias));

ES_INLINE Double8 splat8(double value) { return Double8{} + value; }

ES_INLINE double as_double(uint16_t value) { return from_bf16(value); }
ES_INLINE double as_double(float value) { return value; }
ES_INLINE double as_double(double value) { return value; }

ES_INLINE Double8 load_doubles(const double* address) { return load<Double8>(address); }

ES_INLINE Double8 load_doubles(const float* address) {
#if defined(__AVX512F__)
    return (Double8)_mm512_cvtps_pd(_mm256_loadu_ps(address));
#else
    Double8 values;
    for (int i = 0; i < 8; i++) values[i] = address[i];
    return values;
#endif
}

ES_INLINE Double8 load_doubles(const uint16_t* address) {
#if defined(__AVX512F__)
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
    return (Double8)_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
#else
    Double8 values;
    for (int i = 0; i < 8; i++) values[i] = from_bf16(address[i]);
    return values;
#endif
}

// Sixteen of them, rounded to float.
ES_INLINE Float16 to_float(Double8 first, Double8 second) {
#if defined(__AVX512F__)
    const __m256 low = _mm512_cvtpd_ps((__m512d)first), high = _mm512_cvtpd_ps((__m512d)second);
    return (Float16)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#else
    Float16 values;
    for (int i = 0; i < 8; i++) values[i] = static_cast<float>(first[i]), values[i + 8] = static_cast<float>(second[i]);
    return values;
#endif
}

ES_INLINE Float16 load_as_float(const double* address) {
    return to_float(load_doubles(address), load_doubles(address + 8));
}

// value where mask is set, else 0.
ES_INLINE Double8 where(Long8 mask, Double8 value) { return (Double8)(mask & (Long8)value); }

// The lanes added as a tree, always in the same order.
ES_INLINE double sum_lanes(Double8 value) {
    return ((value[0] + value[4]) + (value[2] + value[6])) + ((value[1] + value[5]) + (value[3] + value[7]));
}

// e^x for x up to 709 within 2 units in the last place, e^-708 below that: 2^n times Taylor's polynomial on
// [-ln 2 / 2, ln 2 / 2], whose first term left out is below 2e-16.
ES_INLINE Double8 exp8(Double8 x) {
    x = x > -708.0 ? x : splat8(-708.0);
    const Double8 magic = splat8(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    const Double8 shifted = x * 1.4426950408889634 + magic;
    const Double8 whole = shifted - magic;
    Double8 rest = x - whole * 0.693147180369123816490;  // of few bits, so that the product is exact
    rest = rest - whole * 1.90821492927058770002e-10;
    Double8 y = splat8(1.0 / 479001600);
    y = y * rest + 1.0 / 39916800;
    y = y * rest + 1.0 / 3628800;
    y = y * rest + 1.0 / 362880;
    y = y * rest + 1.0 / 40320;
    y = y * rest + 1.0 / 5040;
    y = y * rest + 1.0 / 720;
    y = y * rest + 1.0 / 120;
    y = y * rest + 1.0 / 24;
    y = y * rest + 1.0 / 6;
    y = y * rest + 0.5;
    y = y * (rest * rest) + (rest + 1.0);
    return y * (Double8)(((Long8)shifted - (Long8)magic + 1023) << 52);
}

}  // namespace
