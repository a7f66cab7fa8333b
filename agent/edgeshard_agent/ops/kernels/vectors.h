// Sixteen lanes of float or int32: one AVX-512 register, two of AVX2, four of NEON. The compiler lowers them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ES_INLINE inline __attribute__((always_inline))

// Everything is in an unnamed namespace: this header is compiled once for each instruction set, and a function shared
// between those by the linker could run where its instructions do not exist.
namespace {

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int NATIVE_LANES = 16;
#elif defined(__AVX2__)
constexpr int NATIVE_LANES = 8;
#else
constexpr int NATIVE_LANES = 4;
#endif
// Registers of sixteen lanes.
constexpr int PARTS = LANES / NATIVE_LANES;

#if defined(__AVX512F__)

typedef float Float16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Int16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Word16 __attribute__((vector_size(64), aligned(4), may_alias));

template <class T>
ES_INLINE T load(const void* address) {
    T value;
    std::memcpy(&value, address, sizeof(T));
    return value;
}

template <class T>
ES_INLINE void store(void* address, T value) {
    std::memcpy(address, &value, sizeof(T));
}

ES_INLINE Float16 splat(float value) { return Float16{} + value; }
ES_INLINE Int16 splat(int32_t value) { return Int16{} + value; }
ES_INLINE Int16 to_int(Float16 value) { return __builtin_convertvector(value, Int16); }
ES_INLINE Float16 to_float(Int16 value) { return __builtin_convertvector(value, Float16); }

#else

// Registers of the processor side by side. A vector wider than a register is legal C++ for GCC and clang, but GCC keeps
// it in memory and moves it there in pieces; of a struct of registers both keep every piece in one.
typedef float FloatPart __attribute__((vector_size(4 * NATIVE_LANES), may_alias));
typedef int32_t IntPart __attribute__((vector_size(4 * NATIVE_LANES), may_alias));
typedef uint32_t WordPart __attribute__((vector_size(4 * NATIVE_LANES), may_alias));

template <class Element>
struct PartOf;
template <>
struct PartOf<float> {
    using Type = FloatPart;
};
template <>
struct PartOf<int32_t> {
    using Type = IntPart;
};
template <>
struct PartOf<uint32_t> {
    using Type = WordPart;
};

template <class Element>
struct Wide {
    using Part = typename PartOf<Element>::Type;
    Part parts[PARTS];

    // made(i) for each part. Without a loop: no pass of the compiler has to unroll it first.
    template <class Made>
    static ES_INLINE Wide of(const Made& made) {
        if constexpr (PARTS == 2) return {{made(0), made(1)}};
        else return {{made(0), made(1), made(2), made(3)}};
    }

    ES_INLINE Element operator[](int i) const { return parts[i / NATIVE_LANES][i % NATIVE_LANES]; }
    ES_INLINE Element& operator[](int i) { return reinterpret_cast<Element*>(parts)[i]; }

    template <class Other>
    explicit ES_INLINE operator Wide<Other>() const {
        return Wide<Other>::of([&](int i) { return (typename PartOf<Other>::Type)parts[i]; });
    }

#define ES_OPERATOR(op)                                                                                             \
    friend ES_INLINE Wide operator op(const Wide& a, const Wide& b) {                                               \
        return of([&](int i) { return a.parts[i] op b.parts[i]; });                                                 \
    }                                                                                                               \
    friend ES_INLINE Wide operator op(const Wide& a, Element b) {                                                   \
        return of([&](int i) { return a.parts[i] op b; });                                                          \
    }                                                                                                               \
    friend ES_INLINE Wide operator op(Element a, const Wide& b) {                                                   \
        return of([&](int i) { return a op b.parts[i]; });                                                          \
    }                                                                                                               \
    friend ES_INLINE Wide& operator op##=(Wide& a, const Wide& b) { return a = a op b; }
    ES_OPERATOR(+)
    ES_OPERATOR(-)
    ES_OPERATOR(*)
    ES_OPERATOR(/)
    ES_OPERATOR(&)
    ES_OPERATOR(|)
    ES_OPERATOR(^)
#undef ES_OPERATOR
    friend ES_INLINE Wide operator>>(const Wide& a, int bits) {
        return of([&](int i) { return a.parts[i] >> bits; });
    }
    friend ES_INLINE Wide operator<<(const Wide& a, int bits) {
        return of([&](int i) { return a.parts[i] << bits; });
    }
    friend ES_INLINE Wide operator-(const Wide& a) {
        return of([&](int i) { return -a.parts[i]; });
    }
    friend ES_INLINE Wide operator~(const Wide& a) {
        return of([&](int i) { return ~a.parts[i]; });
    }
    friend ES_INLINE Wide<int32_t> operator<(const Wide& a, const Wide& b) {
        return Wide<int32_t>::of([&](int i) { return (IntPart)(a.parts[i] < b.parts[i]); });
    }
};

using Float16 = Wide<float>;
using Int16 = Wide<int32_t>;
using Word16 = Wide<uint32_t>;

template <class T>
struct Memory {
    static ES_INLINE T load(const void* address) {
        T value;
        std::memcpy(&value, address, sizeof(T));
        return value;
    }
    static ES_INLINE void store(void* address, const T& value) { std::memcpy(address, &value, sizeof(T)); }
};
template <class Element>
struct Memory<Wide<Element>> {
    using Part = typename PartOf<Element>::Type;
    static ES_INLINE Wide<Element> load(const void* address) {
        return Wide<Element>::of([&](int i) { return Memory<Part>::load(static_cast<const char*>(address) + i * sizeof(Part)); });
    }
    static ES_INLINE void store(void* address, const Wide<Element>& value) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++) Memory<Part>::store(static_cast<char*>(address) + i * sizeof(Part), value.parts[i]);
    }
};

template <class T>
ES_INLINE T load(const void* address) {
    return Memory<T>::load(address);
}

template <class T>
ES_INLINE void store(void* address, const T& value) {
    Memory<T>::store(address, value);
}

ES_INLINE FloatPart part_of(float value) {
#if defined(__AVX2__)
    return (FloatPart)_mm256_set1_ps(value);
#else
    return FloatPart{value, value, value, value};
#endif
}
ES_INLINE IntPart part_of(int32_t value) { return IntPart{} + value; }

ES_INLINE Float16 splat(float value) {
    const FloatPart part = part_of(value);
    return Float16::of([&](int) { return part; });
}
ES_INLINE Int16 splat(int32_t value) {
    const IntPart part = part_of(value);
    return Int16::of([&](int) { return part; });
}
ES_INLINE Int16 to_int(const Float16& value) {
    return Int16::of([&](int i) { return __builtin_convertvector(value.parts[i], IntPart); });
}
ES_INLINE Float16 to_float(const Int16& value) {
    return Float16::of([&](int i) { return __builtin_convertvector(value.parts[i], FloatPart); });
}

#endif

ES_INLINE float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

ES_INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

ES_INLINE float from_bf16(uint16_t half) { return bits_to_float(static_cast<uint32_t>(half) << 16); }

// To nearest, ties to even, as torch rounds; a NaN stays one.
ES_INLINE uint16_t to_bf16(float value) {
    uint32_t bits = float_to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

ES_INLINE Float16 load_bf16(const uint16_t* address) {
#if defined(__AVX512F__)
    __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
    return (Float16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(__AVX2__)
    return Float16::of([&](int i) {
        return (FloatPart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(address + NATIVE_LANES * i)), 16);
    });
#elif defined(__SSE2__)
    return Float16::of([&](int i) {
        return (FloatPart)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)(address + NATIVE_LANES * i)));
    });
#else
    Word16 words;
    for (int i = 0; i < LANES; i++) words[i] = static_cast<uint32_t>(address[i]) << 16;
    return (Float16)words;
#endif
}

// IEEE half precision, exactly: its exponent moved to a float's place is too small by 112.
ES_INLINE Float16 load_half(const uint16_t* address) {
    Word16 bits = (Word16)load_bf16(address) >> 16;
    Float16 magnitude = (Float16)((bits & 0x7fffu) << 13) * 0x1p112f;
    return (Float16)((Word16)magnitude | (bits & 0x8000u) << 16);
}

ES_INLINE void store_bf16(uint16_t* address, Float16 value) {
#if defined(__AVX512F__)
    Word16 bits = (Word16)value;
    Word16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Word16 is_nan = (Word16)((bits & 0x7fffffffu) > 0x7f800000u);
    rounded = (is_nan & 0x7fc0u) | (~is_nan & rounded);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), _mm512_cvtepi32_epi16((__m512i)rounded));
#elif defined(__AVX2__)
    const Word16 bits = (Word16)value;
    const Word16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    auto part = [&](int i) {
        // Neither has the sign's bit, so that signed comparison does.
        const __m256i is_nan = _mm256_cmpgt_epi32((__m256i)(bits.parts[i] & 0x7fffffffu), _mm256_set1_epi32(0x7f800000));
        return _mm256_blendv_epi8((__m256i)rounded.parts[i], _mm256_set1_epi32(0x7fc0), is_nan);
    };
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(part(0), part(1)), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), halves);
#else
    for (int i = 0; i < LANES; i++) address[i] = to_bf16(value[i]);
#endif
}

ES_INLINE Float16 load_as_float(const float* address) { return load<Float16>(address); }
ES_INLINE Float16 load_as_float(const uint16_t* address) { return load_bf16(address); }
ES_INLINE void store_float(float* address, Float16 value) { store(address, value); }
ES_INLINE void store_float(uint16_t* address, Float16 value) { store_bf16(address, value); }
ES_INLINE float as_float(float value) { return value; }
ES_INLINE float as_float(uint16_t value) { return from_bf16(value); }
ES_INLINE void put_float(float* address, float value) { *address = value; }
ES_INLINE void put_float(uint16_t* address, float value) { *address = to_bf16(value); }

// a * b + c, rounded once where the CPU has an instruction for that. It is said here because a compiler fuses nothing by
// itself (-ffp-contract=off): each would fuse something else, and give other bits. GCC has no such operation for vectors
// wider than the CPU's, and goes through memory for parts of them: there it fuses what it likes (hatch_build.py).
ES_INLINE Float16 fma16(const Float16& a, const Float16& b, const Float16& c) {
#if defined(__AVX512F__)
    return (Float16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return Float16::of([&](int i) { return (FloatPart)_mm256_fmadd_ps((__m256)a.parts[i], (__m256)b.parts[i], (__m256)c.parts[i]); });
#elif defined(__aarch64__)
    return Float16::of([&](int i) { return (FloatPart)vfmaq_f32((float32x4_t)c.parts[i], (float32x4_t)a.parts[i], (float32x4_t)b.parts[i]); });
#else
    return a * b + c;
#endif
}

// acc + even(w) * even(x) + odd(w) * odd(x): 16 pairs of bfloat16 times one broadcast pair.
ES_INLINE Float16 dot_bf16(Float16 acc, Word16 w, uint32_t x) {
#if defined(__AVX512BF16__)
    return (Float16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
    acc = fma16((Float16)(w << 16), splat(bits_to_float(x << 16)), acc);
    return fma16((Float16)(w & 0xffff0000u), splat(bits_to_float(x & 0xffff0000u)), acc);
#endif
}

// acc + the sum of four products, unsigned bytes of w times signed bytes of the broadcast x.
ES_INLINE Int16 dot_u8s8(Int16 acc, Word16 w, uint32_t x) {
#if defined(__AVX512VNNI__)
    return (Int16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32((int)x));
#elif defined(__AVXVNNI__)
    const __m256i inputs = _mm256_set1_epi32((int)x);
    return Int16::of([&](int i) { return (IntPart)_mm256_dpbusd_avx_epi32((__m256i)acc.parts[i], (__m256i)w.parts[i], inputs); });
#elif defined(__ARM_FEATURE_DOTPROD)
    // Signed times signed: of 8 bits the caller has made values of the weights (dot_values).
    const int8x16_t inputs = vreinterpretq_s8_u32(vdupq_n_u32(x));
    return Int16::of([&](int i) { return (IntPart)vdotq_s32((int32x4_t)acc.parts[i], (int8x16_t)w.parts[i], inputs); });
#elif defined(__AVX2__)
    // vpmaddubsw saturates; the bytes are widened to 16 bits instead, the even ones and the odd ones.
    const __m256i mask = _mm256_set1_epi32(0x00ff00ff), wide = _mm256_set1_epi32((int)x);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 8), odd = _mm256_srai_epi16(wide, 8);
    return Int16::of([&](int i) {
        const __m256i low = _mm256_madd_epi16(_mm256_and_si256((__m256i)w.parts[i], mask), even);
        const __m256i high = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)w.parts[i], 8), odd);
        return (IntPart)_mm256_add_epi32((__m256i)acc.parts[i], _mm256_add_epi32(low, high));
    });
#else
    for (int byte = 0; byte < 4; byte++) {
        Int16 part = (Int16)((w >> (8 * byte)) & 0xffu);
        acc += part * splat(static_cast<int32_t>(static_cast<int8_t>(x >> (8 * byte))));
    }
    return acc;
#endif
}

// b where either is a NaN.
ES_INLINE Float16 max16(const Float16& a, const Float16& b) {
#if defined(__AVX512F__)
    return (Float16)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return Float16::of([&](int i) { return (FloatPart)_mm256_max_ps((__m256)a.parts[i], (__m256)b.parts[i]); });
#else
    return Float16::of([&](int i) { return a.parts[i] > b.parts[i] ? a.parts[i] : b.parts[i]; });
#endif
}

ES_INLINE Float16 min16(const Float16& a, const Float16& b) {
#if defined(__AVX512F__)
    return (Float16)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return Float16::of([&](int i) { return (FloatPart)_mm256_min_ps((__m256)a.parts[i], (__m256)b.parts[i]); });
#else
    return Float16::of([&](int i) { return a.parts[i] < b.parts[i] ? a.parts[i] : b.parts[i]; });
#endif
}

// The larger of each two, as unsigned integers.
ES_INLINE Word16 max_words(const Word16& a, const Word16& b) {
#if defined(__AVX512F__)
    return a > b ? a : b;
#else
    return Word16::of([&](int i) { return a.parts[i] > b.parts[i] ? a.parts[i] : b.parts[i]; });
#endif
}

// The lanes added as a tree, always in the same order.
ES_INLINE float sum_lanes(Float16 value) {
#if defined(__AVX512F__)
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)value), _mm512_extractf32x8_ps((__m512)value, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#elif defined(__AVX2__)
    __m256 eight = _mm256_add_ps((__m256)value.parts[0], (__m256)value.parts[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

ES_INLINE float max_lanes(Float16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#elif defined(__AVX2__)
    __m256 eight = _mm256_max_ps((__m256)value.parts[0], (__m256)value.parts[1]);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
    float largest = value[0];
    for (int i = 1; i < LANES; i++) largest = value[i] > largest ? value[i] : largest;
    return largest;
#endif
}

// Rows become columns: four rounds, each of which shuffles the second half of the rows into the first like cards.
ES_INLINE void transpose(Word16 (&rows)[LANES]) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        Word16 shuffled[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            const __m512i first = (__m512i)rows[i], second = (__m512i)rows[i + LANES / 2];
            shuffled[2 * i] = (Word16)_mm512_permutex2var_epi32(first, low, second);
            shuffled[2 * i + 1] = (Word16)_mm512_permutex2var_epi32(first, high, second);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = shuffled[i];
    }
#else
    uint32_t words[LANES][LANES];
    std::memcpy(words, rows, sizeof(words));
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) rows[i][j] = words[j][i];
#endif
}

// e^x for x of at most 88, within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes'
// coefficients).
ES_INLINE Float16 exp16_up_to_88(Float16 x) {
    x = max16(splat(-87.0f), x);
    const Float16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Float16 shifted = fma16(x, splat(1.44269504f), magic);
    // n + 127 in a float's exponent: the shift drops the bits of `magic`.
    Word16 power = ((Word16)shifted << 23) + 0x3f800000u;
    Float16 whole = shifted - magic;
    Float16 rest = fma16(whole, splat(-0.693359375f), x);
    rest = fma16(whole, splat(2.12194440e-4f), rest);
    Float16 y = splat(1.9875691500e-4f);
    y = fma16(y, rest, splat(1.3981999507e-3f));
    y = fma16(y, rest, splat(8.3334519073e-3f));
    y = fma16(y, rest, splat(4.1665795894e-2f));
    y = fma16(y, rest, splat(1.6666665459e-1f));
    y = fma16(y, rest, splat(5.0000001201e-1f));
    y = fma16(y, rest * rest, rest + splat(1.0f));
    return y * (Float16)power;
}

ES_INLINE Float16 exp16(Float16 x) { return exp16_up_to_88(min16(splat(88.0f), x)); }

ES_INLINE Float16 magnitude16(Float16 x) { return (Float16)((Word16)x & 0x7fffffffu); }

// Functions of our own, not the C library's, whose last bits differ between its versions and processors.

// tanh(x) within 3 units in the last place: by e^2x, and near 0 by a polynomial (Cephes' coefficients).
ES_INLINE Float16 tanh16(Float16 x) {
    const Float16 size = magnitude16(x), z = x * x;
    const Float16 far = splat(1.0f) - splat(2.0f) / (exp16(size + size) + splat(1.0f));
    Float16 near = splat(-5.70498872745e-3f);
    near = fma16(near, z, splat(2.06390887954e-2f));
    near = fma16(near, z, splat(-5.37397155531e-2f));
    near = fma16(near, z, splat(1.33314422036e-1f));
    near = fma16(near, z, splat(-3.33332819422e-1f));
    near = fma16(near * z, x, x);
    const Word16 is_near = (Word16)(size < splat(0.625f)), sign = (Word16)x & 0x80000000u;
    return (Float16)((is_near & (Word16)near) | (~is_near & ((Word16)far | sign)));
}

// log(1 + e^x) within 4 units in the last place: x where it is positive, and log(1 + v), v = e^-|x|, which is
// 2 artanh(v / (2 + v)). Its series is one in at most 1/9.
ES_INLINE Float16 softplus16(Float16 x) {
    const Float16 v = exp16(-magnitude16(x)), s = v / (v + splat(2.0f)), z = s * s;
    Float16 y = splat(1.0f / 15);
#pragma GCC unroll 7
    for (int odd = 13; odd > 0; odd -= 2) y = fma16(y, z, splat(1.0f / static_cast<float>(odd)));
    return fma16(s + s, y, max16(splat(0.0f), x));
}

}  // namespace
