// Lanes of double, for what is summed over a whole vocabulary, and comparisons of sixteen floats: eight lanes with AVX-512,
// four with AVX2, two elsewhere. Compilers lower arithmetic on wider vectors than the CPU's, but comparisons badly.
#pragma once

#include <initializer_list>
#include <limits>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int DOUBLES = 8;
#elif defined(__AVX2__)
constexpr int DOUBLES = 4;
#else
constexpr int DOUBLES = 2;
#endif

typedef double Doubles __attribute__((vector_size(8 * DOUBLES), aligned(8), may_alias));
typedef int64_t Longs __attribute__((vector_size(8 * DOUBLES), aligned(8), may_alias));

ES_INLINE Doubles splat_double(double value) { return Doubles{} + value; }

ES_INLINE double as_double(uint16_t value) { return from_bf16(value); }
ES_INLINE double as_double(float value) { return value; }
ES_INLINE double as_double(double value) { return value; }

ES_INLINE Doubles load_doubles(const double* address) { return load<Doubles>(address); }

template <class T>
ES_INLINE Doubles load_doubles(const T* address) {
#if defined(__AVX512F__)
    const __m256i bits = sizeof(T) == 2 ? _mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(address)), 16)
                                        : load<__m256i>(address);
    return (Doubles)_mm512_cvtps_pd(_mm256_castsi256_ps(bits));
#elif defined(__AVX2__)
    const __m128i bits = sizeof(T) == 2 ? _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)address)), 16)
                                        : load<__m128i>(address);
    return (Doubles)_mm256_cvtps_pd(_mm_castsi128_ps(bits));
#else
    Doubles values;
    for (int i = 0; i < DOUBLES; i++) values[i] = as_double(address[i]);
    return values;
#endif
}

// Sixteen of them less the subtrahend, rounded to float.
ES_INLINE Float16 difference(const double* address, double subtrahend) {
#if defined(__AVX512F__)
    const Doubles low = load_doubles(address) - subtrahend, high = load_doubles(address + 8) - subtrahend;
    const __m512 both = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low));
    return (Float16)_mm512_insertf32x8(both, _mm512_cvtpd_ps((__m512d)high), 1);
#else
    float values[LANES];
    for (int i = 0; i < LANES; i += DOUBLES) {
        const Doubles wide = load_doubles(address + i) - subtrahend;
#if defined(__AVX2__)
        _mm_storeu_ps(values + i, _mm256_cvtpd_ps((__m256d)wide));
#else
        for (int j = 0; j < DOUBLES; j++) values[i + j] = static_cast<float>(wide[j]);
#endif
    }
    return load<Float16>(values);
#endif
}
ES_INLINE Float16 difference(const float* address, double subtrahend) {
    return load<Float16>(address) - static_cast<float>(subtrahend);
}
ES_INLINE Float16 difference(const uint16_t* address, double subtrahend) {
    return load_bf16(address) - static_cast<float>(subtrahend);
}

ES_INLINE Float16 load_as_float(const double* address) { return difference(address, 0.0); }

// A bit for each lane, the first lane's the lowest: whether a >= b.
ES_INLINE uint32_t at_least(Float16 a, Float16 b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX2__)
    auto bits = [&](int i) { return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a.parts[i], (__m256)b.parts[i], _CMP_GE_OQ)); };
    return static_cast<uint32_t>(bits(0) | bits(1) << 8);
#else
    typedef float Float4 __attribute__((vector_size(16), may_alias));
    typedef int32_t Int4 __attribute__((vector_size(16), may_alias));
    Float4 x[4], y[4];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    const Int4 lanes = {1, 2, 4, 8};
    Int4 bits = {};
    for (int i = 0; i < 4; i++) bits |= (Int4)(x[i] >= y[i]) & (lanes << (4 * i));
    return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
#endif
}
ES_INLINE uint32_t at_least(Float16 a, float b) { return at_least(a, splat(b)); }

// value where mask is set, else 0.
ES_INLINE Doubles where(Longs mask, Doubles value) { return (Doubles)(mask & (Longs)value); }

// The lanes added in a fixed order.
ES_INLINE double sum_lanes(Doubles value) {
    double sum = 0;
    for (int i = 0; i < DOUBLES / 2; i++) sum += value[i] + value[i + DOUBLES / 2];
    return sum;
}

ES_INLINE Doubles fma_doubles(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__clang__) && defined(__aarch64__)
    return __builtin_elementwise_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x for x up to 709 within 2 units in the last place, e^-708 below that: 2^n times Taylor's polynomial on
// [-ln 2 / 2, ln 2 / 2], whose first term left out is below 2e-16.
ES_INLINE Doubles exp_doubles(Doubles x) {
    x = x > -708.0 ? x : splat_double(-708.0);
    const Doubles magic = splat_double(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    const Doubles shifted = fma_doubles(x, splat_double(1.4426950408889634), magic);
    const Doubles whole = shifted - magic;
    // The first part has few bits, so that the product is exact.
    Doubles rest = fma_doubles(whole, splat_double(-0.693147180369123816490), x);
    rest = fma_doubles(whole, splat_double(-1.90821492927058770002e-10), rest);
    Doubles y = splat_double(1.0 / 479001600);
    for (const double term : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                              1.0 / 24, 1.0 / 6, 0.5})
        y = fma_doubles(y, rest, splat_double(term));
    y = fma_doubles(y, rest * rest, rest + 1.0);
    return y * (Doubles)(((Longs)shifted - (Longs)magic + 1023) << 52);
}

}  // namespace
