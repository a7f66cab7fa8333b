// Products of rows of int8 with weights of 8, 4 or 2 bits: exact integers, so that every form gives the same sums.
#pragma once

#include <type_traits>

#include "products.h"
#include "vectors.h"

namespace {

// Every group holds a multiple of so many inputs.
constexpr int GROUP_STEP = 32;
// Bytes of 32 outputs' weights that are read at a time, and the inputs of each output in them.
constexpr int CHUNK_BYTES = 4 * PANEL;
template <int BITS>
constexpr int CHUNK_INPUTS = 32 / BITS;

// The inputs 4 * PART to 4 * PART + 3 of a chunk, unsigned. Of int2 twice the two bits, which is value + 3.
template <int BITS, int PART>
ES_INLINE Word16 quarter(Word16 w) {
    if constexpr (BITS == 8) return w;
    if constexpr (BITS == 4) return (PART ? w >> 4 : w) & 0x0f0f0f0fu;
    if constexpr (BITS == 2) return (PART ? w >> (2 * PART - 1) : w << 1) & 0x06060606u;
}

// The sums of a group, for ROWS rows and VECTORS vectors of outputs. `begin` sets them to what the zero point of the
// weights takes away; `add` adds the products of `inputs` inputs, a multiple of GROUP_STEP. `line` counts the lines of 64 bytes of a panel that were read.
template <int BITS, int ROWS, int VECTORS>
struct Dots {
#if defined(__ARM_FEATURE_DOTPROD)
    // The instruction multiplies two signed bytes: 8 bits become values again, and there is no zero point.
    static constexpr bool IS_SIGNED = BITS == 8;
#else
    static constexpr bool IS_SIGNED = false;
#endif
    static constexpr int INPUT_BYTES = 1;
    Int16 at[ROWS][VECTORS];

    ES_INLINE void begin(const int32_t* offsets) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const Int16 first = IS_SIGNED ? Int16{} : splat(offsets[r]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) at[r][v] = first;
        }
    }

    template <class Ahead>
    ES_INLINE void add(const char* weights, const char* rows, int64_t row_bytes, int inputs, int64_t line,
                       Ahead ahead) {
        constexpr int INPUTS = CHUNK_INPUTS<BITS>;
        for (int i = 0; i < inputs; i += INPUTS, weights += CHUNK_BYTES, rows += INPUTS, line += 2) {
            Word16 w[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                w[v] = load<Word16>(weights + v * 64);
                if constexpr (IS_SIGNED) w[v] = w[v] ^ 0x80808080u;
                if (v < Ahead::VECTORS) ahead.fetch(weights + v * 64, line);
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) add_chunk<0>(r, w, rows + r * row_bytes);
        }
    }

   private:
    template <int PART>
    ES_INLINE void add_chunk(int r, const Word16 (&w)[VECTORS], const char* row) {
        const uint32_t inputs = load<uint32_t>(row + 4 * PART);
        for (int v = 0; v < VECTORS; v++) at[r][v] = dot_u8s8(at[r][v], quarter<BITS, PART>(w[v]), inputs);
        if constexpr (PART + 1 < 8 / BITS) add_chunk<PART + 1>(r, w, row);
    }
};

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define ES_PAIRS_OF_BYTES 1  // the best instruction adds two products in 16 bits, and saturates

// Adds to a sum of 16-bit or 32-bit lanes, in the order of the source. GCC adds integers in an order of its own, all
// products first, for which there are no registers.
ES_INLINE void add_words(__m256i& sum, __m256i value) {
#if defined(__clang__)
    sum = _mm256_add_epi16(sum, value);
#else
    __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(value));
#endif
}
ES_INLINE void add_double_words(__m256i& sum, __m256i value) {
#if defined(__clang__)
    sum = _mm256_add_epi32(sum, value);
#else
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(value));
#endif
}

// The rows that are read for vector `v`. A compiler would keep the inputs of many rows in registers for all vectors.
template <int ROWS>
ES_INLINE const char* rows_for(int v, const char* rows) {
    return ROWS > 1 && v > 0 ? loaded_again(rows) : rows;
}

// Weights of 4 bits or fewer: the products of 32 inputs fit 16 bits. Each lane adds 8 pairs, at most 2 * 15 * 127 each,
// which is 30,480.
template <int BITS, int ROWS, int VECTORS>
struct ShortDots : Dots<BITS, ROWS, VECTORS> {
    template <class Ahead>
    ES_INLINE void add(const char* weights, const char* rows, int64_t row_bytes, int inputs, int64_t line,
                       Ahead ahead) {
        constexpr int CHUNKS = GROUP_STEP / CHUNK_INPUTS<BITS>;
        for (int i = 0; i < inputs; i += GROUP_STEP) {
            add_step(weights + i / GROUP_STEP * CHUNKS * CHUNK_BYTES, rows + i, row_bytes, line, ahead);
            line += 2 * CHUNKS;
        }
    }

   private:
    // The products of GROUP_STEP inputs.
    template <class Ahead>
    ES_INLINE void add_step(const char* weights, const char* rows, int64_t row_bytes, int64_t line, Ahead ahead) {
        constexpr int INPUTS = CHUNK_INPUTS<BITS>;
        __m256i pairs[ROWS][VECTORS][PARTS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) pairs[r][v][0] = pairs[r][v][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int i = 0; i < GROUP_STEP; i += INPUTS, weights += CHUNK_BYTES, rows += INPUTS, line += 2) {
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                if (v < Ahead::VECTORS) ahead.fetch(weights + v * 64, line);
                add_parts<0>(pairs, v, weights + v * 64, rows_for<ROWS>(v, rows), row_bytes);
            }
        }
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                auto widened = [&](int i) { return (IntPart)_mm256_madd_epi16(pairs[r][v][i], ones); };
                this->at[r][v] += Int16::of(widened);
            }
    }

    template <int PART>
    static ES_INLINE void add_parts(__m256i (&pairs)[ROWS][VECTORS][PARTS], int v, const char* weights,
                                    const char* rows, int64_t row_bytes) {
        const Word16 part = quarter<BITS, PART>(load<Word16>(loaded_again(weights)));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const __m256i inputs = _mm256_set1_epi32(load<int32_t>(rows + r * row_bytes + 4 * PART));
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; i++)
                add_words(pairs[r][v][i], _mm256_maddubs_epi16((__m256i)part.parts[i], inputs));
        }
        if constexpr (PART + 1 < 8 / BITS) add_parts<PART + 1>(pairs, v, weights, rows, row_bytes);
    }
};

// Weights of 8 bits: they and the rows are widened to 16 bits, in which a product of two pairs is exact. Rows come widened,
// as `widen_row` writes them, so that one instruction loads a pair into all lanes.
template <int ROWS, int VECTORS>
struct ByteDots : Dots<8, ROWS, VECTORS> {
    static constexpr int INPUT_BYTES = 2;

    template <class Ahead>
    ES_INLINE void add(const char* weights, const char* rows, int64_t row_bytes, int inputs, int64_t line,
                       Ahead ahead) {
        __m256i sums[ROWS][VECTORS][PARTS];
        for_each([&](int r, int v, int i) { sums[r][v][i] = (__m256i)this->at[r][v].parts[i]; });
#pragma GCC unroll 1
        for (int n = 0; n < inputs; n += 4, weights += CHUNK_BYTES, rows += 8, line += 2) {
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                if (v < Ahead::VECTORS) ahead.fetch(weights + v * 64, line);
                add_chunk(sums, v, weights + v * 64, rows_for<ROWS>(v, rows), row_bytes);
            }
        }
        for_each([&](int r, int v, int i) { this->at[r][v].parts[i] = (IntPart)sums[r][v][i]; });
    }

   private:
    static ES_INLINE void add_chunk(__m256i (&sums)[ROWS][VECTORS][PARTS], int v, const char* weights,
                                    const char* rows, int64_t row_bytes) {
        __m256i even[PARTS], odd[PARTS];
#pragma GCC unroll 2
        for (int i = 0; i < PARTS; i++) {
            const __m256i bytes = load<__m256i>(weights + i * 32);
            even[i] = _mm256_and_si256(bytes, _mm256_set1_epi32(0x00ff00ff));
            odd[i] = _mm256_srli_epi16(bytes, 8);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const __m256i even_inputs = _mm256_set1_epi32(load<int32_t>(rows + r * row_bytes));
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; i++) add_double_words(sums[r][v][i], _mm256_madd_epi16(even[i], even_inputs));
            const __m256i odd_inputs = _mm256_set1_epi32(load<int32_t>(rows + r * row_bytes + 4));
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; i++) add_double_words(sums[r][v][i], _mm256_madd_epi16(odd[i], odd_inputs));
        }
    }

    template <class Task>
    static ES_INLINE void for_each(const Task& task) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 2
                for (int i = 0; i < PARTS; i++) task(r, v, i);
    }
};

// The numbers of a row in 16 bits: of every four the even ones, then the odd ones. `width` is a multiple of four.
ES_INLINE void widen_row(const int8_t* row, int width, int16_t* wide) {
    for (int i = 0; i < width; i += 4) {
        wide[i] = row[i];
        wide[i + 1] = row[i + 2];
        wide[i + 2] = row[i + 1];
        wide[i + 3] = row[i + 3];
    }
}

template <int BITS, int ROWS, int VECTORS>
using GroupDots = std::conditional_t<BITS == 8, ByteDots<ROWS, VECTORS>, ShortDots<BITS, ROWS, VECTORS>>;
#else
template <int BITS, int ROWS, int VECTORS>
using GroupDots = Dots<BITS, ROWS, VECTORS>;
#endif

// The most rows of a tile, and the vectors of outputs that it computes together. AVX2 keeps weights, an input and a
// product in registers besides the sums.
template <int BITS>
constexpr int most_integer_rows() {
#if defined(ES_PAIRS_OF_BYTES)
    return 4;
#elif defined(__aarch64__) && !defined(__ARM_FEATURE_DOTPROD)
    return BITS == 8 ? 3 : 2;  // products are widened twice, in registers besides
#else
    return MOST_ROWS;
#endif
}
constexpr int integer_vectors(int rows) {
#if defined(ES_PAIRS_OF_BYTES)
    return rows <= 2 ? 2 : 1;
#elif defined(__aarch64__) && !defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return vectors_with(rows, 2);
#endif
}

}  // namespace
