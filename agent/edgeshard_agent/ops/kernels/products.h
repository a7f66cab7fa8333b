// Products of rows with 32 outputs: what linear layers and attention are made of.
#pragma once

#include "vectors.h"

namespace {

constexpr int PANEL = 2 * LANES;
// The rows computed together: as many as leave registers for their sums, of 32 outputs (32 registers of 16 lanes) or of
// 16 (16 registers of 8 lanes, or 32 of 4).
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12, MOST_VECTORS = 24;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int MOST_ROWS = 6, MOST_VECTORS = 6;
#else
constexpr int MOST_ROWS = 3, MOST_VECTORS = 3;
#endif

// Vectors of outputs that are computed together with so many rows.
constexpr int vectors_with(int rows, int most) { return rows * most <= MOST_VECTORS || most == 1 ? most : vectors_with(rows, most / 2); }

template <int ROWS, int VECTORS = 2>
struct Sums {
    Float16 at[ROWS][VECTORS];
};

// What to fetch while the outputs are read: nothing where the processor foresees it, or what lies so far from them, into
// the second-level cache or, where it is needed next, into the first.
struct NothingAhead {
    ES_INLINE void fetch(const char*) const {}
};
struct FetchAhead {
    int64_t distance;

    ES_INLINE void fetch(const char* outputs) const { __builtin_prefetch(outputs + distance, 0, 2); }
};

// What lies ahead of all passes over some outputs, a share of it in each: while those before are multiplied it comes into
// the second-level cache, little by little.
struct FetchShare {
    const char *begin, *share;
    int64_t step;  // for every 128 bytes of outputs

    ES_INLINE void fetch(const char* outputs) const { __builtin_prefetch(share + ((outputs - begin) >> 7) * step, 0, 2); }
};

struct FetchNext {
    int64_t distance;

    ES_INLINE void fetch(const char* outputs) const { __builtin_prefetch(outputs + distance, 0, 3); }
};

// A product adds ROWS rows of `depth` numbers, `row_bytes` apart, times vectors of outputs, each of which holds STEP
// inputs at a time, STRIDE bytes behind the last. `Row` is the element of a row, `Panel` that of the outputs' weights.

struct Fp32Product {
    using Row = float;
    using Panel = float;
    static constexpr int STEP = 1;

    template <int STRIDE, class Ahead, int ROWS, int VECTORS>
    static ES_INLINE void add(Sums<ROWS, VECTORS>& sums, const char* rows, int64_t row_bytes,
                              const char* const (&outputs)[VECTORS], int64_t depth, Ahead ahead) {
        // A copy: of what is referred to, a compiler may write every step to memory.
        Sums<ROWS, VECTORS> own = sums;
        for (int64_t k = 0; k < depth; k++, rows += 4) {
            Float16 w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                w[v] = load<Float16>(outputs[v] + k * STRIDE);
                ahead.fetch(outputs[v] + k * STRIDE);
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                Float16 value = splat(load<float>(rows + r * row_bytes));
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) own.at[r][v] = fma16(w[v], value, own.at[r][v]);
            }
        }
        sums = own;
    }
};

struct Bf16Product {
    using Row = uint16_t;
    using Panel = uint16_t;
    static constexpr int STEP = 2;

    template <int STRIDE, class Ahead, int ROWS, int VECTORS>
    static ES_INLINE void add(Sums<ROWS, VECTORS>& sums, const char* rows, int64_t row_bytes,
                              const char* const (&outputs)[VECTORS], int64_t depth, Ahead ahead) {
        for (int64_t k = 0; k < depth / 2; k++, rows += 4) {
            Word16 w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                w[v] = load<Word16>(outputs[v] + k * STRIDE);
                ahead.fetch(outputs[v] + k * STRIDE);
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                uint32_t pair = load<uint32_t>(rows + r * row_bytes);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums.at[r][v] = dot_bf16(sums.at[r][v], w[v], pair);
            }
        }
    }
};

// Rows in float32 times bfloat16, exactly.
struct MixedProduct {
    using Row = float;
    using Panel = uint16_t;
    static constexpr int STEP = 2;

    template <int STRIDE, class Ahead, int ROWS, int VECTORS>
    static ES_INLINE void add(Sums<ROWS, VECTORS>& sums, const char* rows, int64_t row_bytes,
                              const char* const (&outputs)[VECTORS], int64_t depth, Ahead ahead) {
        // A copy: of what is referred to, a compiler may write every step to memory.
        Sums<ROWS, VECTORS> own = sums;
        for (int64_t k = 0; k < depth / 2; k++, rows += 8) {
            Word16 w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                w[v] = load<Word16>(outputs[v] + k * STRIDE);
                ahead.fetch(outputs[v] + k * STRIDE);
            }
            // All rows' even inputs, then the odd ones: a sum's order is the same, and half of the weights are in registers.
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const Float16 even = splat(load<float>(rows + r * row_bytes));
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    own.at[r][v] = fma16((Float16)(w[v] << 16), even, own.at[r][v]);
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const Float16 odd = splat(load<float>(rows + r * row_bytes + 4));
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    own.at[r][v] = fma16((Float16)(w[v] & 0xffff0000u), odd, own.at[r][v]);
            }
        }
        sums = own;
    }
};

}  // namespace
