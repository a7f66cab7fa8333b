// Products of rows of int8 with weights in llama.cpp's block formats: 256 inputs of an output share a block, whose groups
// have scales of 6 or 8 bits. Sums of a group are exact integers; groups are added in order, as in every integer scheme.
#pragma once

#include "integer_products.h"
#include "kernels.h"

namespace {

constexpr int BLOCK_INPUTS = 256;

// What a format's packed block of 32 outputs is made of (kernels.h). HIGH_BITS are those of a weight above its low four.
template <int32_t SCHEME>
struct BlockForm;
template <>
struct BlockForm<Q4_K> {
    static constexpr int GROUP = 32, HIGH_BITS = 0;
    static constexpr bool HAS_MINIMA = true, HAS_LEVELS = false;
};
template <>
struct BlockForm<Q5_K> {
    static constexpr int GROUP = 32, HIGH_BITS = 1;
    static constexpr bool HAS_MINIMA = true, HAS_LEVELS = false;
};
template <>
struct BlockForm<Q6_K> {
    static constexpr int GROUP = 16, HIGH_BITS = 2;
    static constexpr bool HAS_MINIMA = false, HAS_LEVELS = false;
};
template <>
struct BlockForm<IQ4_XS> {
    static constexpr int GROUP = 32, HIGH_BITS = 0;
    static constexpr bool HAS_MINIMA = false, HAS_LEVELS = true;
};

template <class Form>
struct BlockSizes {
    // Groups of a run of inputs that are rounded with one scale.
    static constexpr int GROUPS = GROUP_STEP / Form::GROUP;
    static constexpr int RUNS = BLOCK_INPUTS / GROUP_STEP;
    static constexpr int LOW_CHUNKS = Form::GROUP / CHUNK_INPUTS<4>;
    static constexpr int HIGH_CHUNKS = Form::HIGH_BITS ? 1 : 0;
    static constexpr int FACTORS_BYTES = (Form::HAS_MINIMA ? 2 : 1) * 2 * PANEL;
    static constexpr int SCALES_BYTES = (GROUPS + (Form::HAS_MINIMA ? 1 : 0)) * PANEL;
    static constexpr int GROUP_BYTES = (LOW_CHUNKS + HIGH_CHUNKS) * CHUNK_BYTES;
    static constexpr int BLOCK_BYTES = FACTORS_BYTES + RUNS * (SCALES_BYTES + GROUPS * GROUP_BYTES);
};

// 16 bytes as integers.
template <bool IS_SIGNED>
ES_INLINE Int16 load_bytes(const char* address) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
    return (Int16)(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    return Int16::of([&](int i) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(address + NATIVE_LANES * i));
        return (IntPart)(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
    });
#else
    int32_t values[LANES];
    for (int i = 0; i < LANES; i++)
        values[i] = IS_SIGNED ? int32_t{static_cast<int8_t>(address[i])} : int32_t{static_cast<uint8_t>(address[i])};
    return load<Int16>(values);
#endif
}

// The inputs 4 * PART to 4 * PART + 3 of a group, whose low bits are in chunks of eight inputs, and its high bits in one.
template <int HIGH_BITS, int PART>
ES_INLINE Word16 whole_quarter(Word16 low, Word16 high) {
    constexpr uint32_t MASK = HIGH_BITS == 2 ? 0x30303030u : 0x10101010u;
    constexpr int SHIFT = HIGH_BITS * PART - 4;
    const Word16 nibbles = quarter<4, PART % 2>(low);
    if constexpr (SHIFT < 0) return nibbles | ((high << -SHIFT) & MASK);
    if constexpr (SHIFT == 0) return nibbles | (high & MASK);
    return nibbles | ((high >> (SHIFT > 0 ? SHIFT : 0)) & MASK);
}

// The sums of a group of weights whose bits lie apart, for ROWS rows and VECTORS vectors of outputs.
template <class Form, int ROWS, int VECTORS>
struct SplitDots {
    static constexpr int QUARTERS = Form::GROUP / 4;
    Int16 at[ROWS][VECTORS];

    ES_INLINE void add(const char* low, const char* high, const char* rows, int64_t row_bytes) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) at[r][v] = Int16{};
        add_from<0>(low, high, rows, row_bytes);
    }

   private:
#if defined(ES_PAIRS_OF_BYTES)
    // Products of so many quarters fit 16 bits: 2 * 63 * 127 * 2 is 32,004, 4 * 31 * 127 * 2 is 31,496.
    static constexpr int AT_ONCE = Form::HIGH_BITS == 2 ? 2 : 4;

    template <int PART>
    ES_INLINE void add_from(const char* low, const char* high, const char* rows, int64_t row_bytes) {
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            __m256i pairs[ROWS][PARTS];
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
            add_quarters<PART, PART + AT_ONCE>(pairs, low + v * 64, high + v * 64, rows_for<ROWS>(v, rows), row_bytes);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                auto widened = [&](int i) { return (IntPart)_mm256_madd_epi16(pairs[r][i], ones); };
                at[r][v] += Int16::of(widened);
            }
        }
        if constexpr (PART + AT_ONCE < QUARTERS) add_from<PART + AT_ONCE>(low, high, rows, row_bytes);
    }

    template <int PART, int END>
    static ES_INLINE void add_quarters(__m256i (&pairs)[ROWS][PARTS], const char* low, const char* high,
                                       const char* rows, int64_t row_bytes) {
        const Word16 weights = whole_quarter<Form::HIGH_BITS, PART>(
            load<Word16>(loaded_again(low + PART / 2 * CHUNK_BYTES)), load<Word16>(loaded_again(high)));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const __m256i inputs = _mm256_set1_epi32(load<int32_t>(rows + r * row_bytes + 4 * PART));
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; i++)
                add_words(pairs[r][i], _mm256_maddubs_epi16((__m256i)weights.parts[i], inputs));
        }
        if constexpr (PART + 1 < END) add_quarters<PART + 1, END>(pairs, low, high, rows, row_bytes);
    }
#else
    template <int PART>
    ES_INLINE void add_from(const char* low, const char* high, const char* rows, int64_t row_bytes) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const Word16 weights = whole_quarter<Form::HIGH_BITS, PART>(
                load<Word16>(low + PART / 2 * CHUNK_BYTES + v * 64), load<Word16>(high + v * 64));
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++)
                at[r][v] = dot_u8s8(at[r][v], weights, load<uint32_t>(rows + r * row_bytes + 4 * PART));
        }
        if constexpr (PART + 1 < QUARTERS) add_from<PART + 1>(low, high, rows, row_bytes);
    }
#endif
};

// The values that four bits of iq4_xs stand for, and the same made unsigned by 128.
constexpr int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int LEVELS_ZERO = 128;

// The sums of a group of weights that are places in LEVELS.
template <int ROWS, int VECTORS>
struct LevelDots {
    static constexpr int QUARTERS = GROUP_STEP / 4;
    Int16 at[ROWS][VECTORS];

    template <class Ahead>
    ES_INLINE void add(const int32_t* offsets, const char* weights, const char* rows, int64_t row_bytes, int64_t line,
                       Ahead ahead) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) at[r][v] = IS_SIGNED ? Int16{} : splat(offsets[r]);
#pragma GCC unroll 1
        for (int chunk = 0; chunk < QUARTERS / 2; chunk++, weights += CHUNK_BYTES, rows += 8, line += 2) {
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                if (v < Ahead::VECTORS) ahead.fetch(weights + v * 64, line);
                add_quarter<0>(v, load<Word16>(weights + v * 64), rows, row_bytes);
                add_quarter<1>(v, load<Word16>(weights + v * 64), rows, row_bytes);
            }
        }
    }

   private:
#if defined(ES_PAIRS_OF_BYTES)
    // A pair of products fits 16 bits if the weights are without their signs, which the inputs take: 2 * 127 * 127.
    static constexpr bool IS_SIGNED = true;

    template <int PART>
    ES_INLINE void add_quarter(int v, Word16 codes, const char* rows, int64_t row_bytes) {
        const Word16 places = quarter<4, PART>(codes);
        const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(LEVELS));
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i signs[PARTS], sizes[PARTS];
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; i++) {
            signs[i] = _mm256_shuffle_epi8(table, (__m256i)places.parts[i]);
            sizes[i] = _mm256_abs_epi8(signs[i]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const __m256i inputs = _mm256_set1_epi32(load<int32_t>(rows + r * row_bytes + 4 * PART));
            at[r][v] += Int16::of([&](int i) {
                const __m256i pairs = _mm256_maddubs_epi16(sizes[i], _mm256_sign_epi8(inputs, signs[i]));
                return (IntPart)_mm256_madd_epi16(pairs, ones);
            });
        }
    }
#else
#if defined(__ARM_FEATURE_DOTPROD)
    static constexpr bool IS_SIGNED = true;  // the instruction multiplies two signed bytes
#else
    static constexpr bool IS_SIGNED = false;
#endif

    template <int PART>
    ES_INLINE void add_quarter(int v, Word16 codes, const char* rows, int64_t row_bytes) {
        const Word16 weights = looked_up(quarter<4, PART>(codes));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
            at[r][v] = dot_u8s8(at[r][v], weights, load<uint32_t>(rows + r * row_bytes + 4 * PART));
    }

    // The levels at 64 places; unsigned unless the instruction multiplies signed bytes.
    static ES_INLINE Word16 looked_up(Word16 places) {
#if defined(__AVX512F__)
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(LEVELS)));
        return (Word16)_mm512_shuffle_epi8(table, (__m512i)places) ^ 0x80808080u;
#elif defined(__AVX2__)
        const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(LEVELS));
        return Word16::of([&](int i) { return (WordPart)_mm256_shuffle_epi8(table, (__m256i)places.parts[i]); }) ^
               0x80808080u;
#else
        uint8_t bytes[4 * LANES];
        std::memcpy(bytes, &places, sizeof(bytes));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(LEVELS[byte] + (IS_SIGNED ? 0 : LEVELS_ZERO));
        return load<Word16>(bytes);
#endif
    }
#endif
};

}  // namespace
