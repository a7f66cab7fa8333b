// Products of rows with 32 outputs: what linear layers and attention are made of.
#pragma once

#include "vectors.h"

namespace {

constexpr int PANEL = 2 * LANES;

// The rows that a tile computes together, and the vectors of sums that it keeps in registers: 12 rows times 32 outputs in
// the 32 registers of AVX-512, 6 rows times 16 outputs in 16 registers of 8 lanes, 4 rows times 16 outputs in 32 of 4
// lanes. NEON has room for 6 rows, but GCC then keeps some sums in memory.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;
constexpr int MOST_VECTORS = 24;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 6;
constexpr int MOST_VECTORS = 6;
#elif defined(__aarch64__)
constexpr int MOST_ROWS = 4;
constexpr int MOST_VECTORS = 3;
#else
constexpr int MOST_ROWS = 3;
constexpr int MOST_VECTORS = 3;
#endif

// The vectors of outputs, at most `most`, whose sums fit into registers with `rows` rows.
constexpr int vectors_with(int rows, int most) {
    return most == 1 || rows * most <= MOST_VECTORS ? most : vectors_with(rows, most / 2);
}

// The vectors of outputs whose weights are in registers at the same time: one, unless registers are many.
#if defined(__AVX512F__)
template <int VECTORS>
constexpr int AT_ONCE = VECTORS;
#else
template <int VECTORS>
constexpr int AT_ONCE = 1;
#endif

// So few rows leave registers for the even and the odd weights at the same time.
constexpr int FEW_ROWS = 2;

template <int ROWS, int VECTORS = 2>
struct Sums {
    Float16 at[ROWS][VECTORS];
};

// What a product fetches while it reads outputs: nothing if the processor foresees it, or the memory that lies at a
// distance from them, into the second-level cache (FetchAhead) or into the first (FetchNext). `line` counts the cache
// lines of 64 bytes from the beginning of the outputs, and VECTORS the vectors of a step for which it fetches.
struct NothingAhead {
    static constexpr int VECTORS = 0;

    ES_INLINE void fetch(const char*, int64_t = 0) const {}
};
struct FetchAhead {
    static constexpr int VECTORS = 4;

    int64_t distance;

    ES_INLINE void fetch(const char* outputs, int64_t = 0) const { __builtin_prefetch(outputs + distance, 0, 2); }
};
struct FetchNext {
    static constexpr int VECTORS = 4;

    int64_t distance;

    ES_INLINE void fetch(const char* outputs, int64_t = 0) const { __builtin_prefetch(outputs + distance, 0, 3); }
};

// The same for one vector of those that are read together.
struct FetchOncePerStep {
    static constexpr int VECTORS = 1;

    int64_t distance;

    ES_INLINE void fetch(const char* outputs, int64_t = 0) const { __builtin_prefetch(outputs + distance, 0, 2); }
};

// One share of the outputs that follow. Several passes over a panel fetch one share each, so that the next panel is in
// the second-level cache when its first pass begins.
struct FetchShare {
    static constexpr int VECTORS = 1;

    const char* share;
    int64_t step;  // bytes for each line; at most 32, or a pass that reads two lines at a time leaves one out

    ES_INLINE void fetch(const char*, int64_t line) const { __builtin_prefetch(share + line * step, 0, 2); }
};

// The same address, but a compiler does not know that. It then loads from memory what it would otherwise keep in
// registers, of which there are too few.
ES_INLINE const char* loaded_again(const char* address) {
#if !defined(__AVX512F__)
    __asm__("" : "+r"(address));
#endif
    return address;
}

#if !defined(__AVX512F__)
// The upper halves of words: odd numbers of bfloat16 as float32. GCC loads the mask each time, because a
// register that keeps it is one too many for the sums of a tile.
template <int ROWS>
ES_INLINE Float16 upper_halves(const char* words) {
    if constexpr (ROWS <= FEW_ROWS) return (Float16)(load<Word16>(words) & 0xffff0000u);
#if defined(__clang__)
    return (Float16)(load<Word16>(loaded_again(words)) & 0xffff0000u);
#else
    static const WordPart MASK = WordPart{} + 0xffff0000u;
    const WordPart mask = Memory<WordPart>::load(loaded_again(reinterpret_cast<const char*>(&MASK)));
    const Word16 pairs = load<Word16>(loaded_again(words));
    return Float16::of([&](int i) { return (FloatPart)(mask & pairs.parts[i]); });
#endif
}
#endif

// Adds one input of each row times some vectors of weights, to the sums from vector `first` on.
template <int ROWS, int VECTORS, int SOME>
ES_INLINE void add_rows(Sums<ROWS, VECTORS>& sums, const Float16 (&weights)[SOME], const char* rows, int64_t row_bytes,
                        int first) {
    if constexpr (ROWS > 1)
        if (first > 0) rows = loaded_again(rows);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        const Float16 input = splat(load<float>(rows + r * row_bytes));
#pragma GCC unroll 4
        for (int v = 0; v < SOME; v++) sums.at[r][first + v] = fma16(weights[v], input, sums.at[r][first + v]);
    }
}

// The numbers of a row, exactly.
ES_INLINE void widen_row(const uint16_t* row, int width, float* wide) {
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(wide + i, load_bf16(row + i));
    for (; i < width; i++) wide[i] = from_bf16(row[i]);
}

// A product adds ROWS rows of `depth` numbers, `row_bytes` apart, times vectors of outputs, each of which holds STEP
// inputs at a time, STRIDE bytes after the last. `Row` is the element of a row, `Panel` that of the outputs' weights.
// Each sum adds one product after the other in the order of the inputs, whatever else is computed with it.

struct Fp32Product {
    using Row = float;
    using Panel = float;
    static constexpr int STEP = 1;

    template <int STRIDE, class Ahead, int ROWS, int VECTORS>
    static ES_INLINE void add(Sums<ROWS, VECTORS>& sums, const char* rows, int64_t row_bytes,
                              const char* const (&outputs)[VECTORS], int64_t depth, Ahead ahead) {
        // A copy: GCC writes each step of a reference's sums to memory.
        Sums<ROWS, VECTORS> own = sums;
        for (int64_t k = 0; k < depth; k++, rows += 4) {
#pragma GCC unroll 4
            for (int first = 0; first < VECTORS; first += AT_ONCE<VECTORS>) {
                Float16 w[AT_ONCE<VECTORS>];
#pragma GCC unroll 4
                for (int v = 0; v < AT_ONCE<VECTORS>; v++) {
                    const char* weights = outputs[first + v] + k * STRIDE;
                    w[v] = load<Float16>(weights);
                    if (first + v < Ahead::VECTORS) ahead.fetch(weights, k * (STRIDE / 64));
                }
                add_rows(own, w, rows, row_bytes, first);
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
                if (v < Ahead::VECTORS) ahead.fetch(outputs[v] + k * STRIDE);
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
        // A copy: GCC writes each step of a reference's sums to memory.
        Sums<ROWS, VECTORS> own = sums;
        for (int64_t k = 0; k < depth / 2; k++, rows += 8) add_pair<STRIDE>(own, rows, row_bytes, outputs, k, ahead);
        sums = own;
    }

   private:
    // Two inputs of each row.
    template <int STRIDE, class Ahead, int ROWS, int VECTORS>
    static ES_INLINE void add_pair(Sums<ROWS, VECTORS>& sums, const char* rows, int64_t row_bytes,
                                   const char* const (&outputs)[VECTORS], int64_t k, Ahead ahead) {
#if defined(__AVX512F__)
        Word16 w[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            w[v] = load<Word16>(outputs[v] + k * STRIDE);
            ahead.fetch(outputs[v] + k * STRIDE);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const Float16 even = splat(load<float>(rows + r * row_bytes));
            const Float16 odd = splat(load<float>(rows + r * row_bytes + 4));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                sums.at[r][v] = fma16((Float16)(w[v] << 16), even, sums.at[r][v]);
                sums.at[r][v] = fma16((Float16)(w[v] & 0xffff0000u), odd, sums.at[r][v]);
            }
        }
#else
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            // The even inputs of all rows come first, so that half of the weights are in registers at a time.
            const char* weights = outputs[v] + k * STRIDE;
            const Float16 even[] = {(Float16)(load<Word16>(weights) << 16)};
            if (v < Ahead::VECTORS) ahead.fetch(weights, k * (STRIDE / 64));
            add_rows(sums, even, rows, row_bytes, v);
            const Float16 odd[] = {upper_halves<ROWS>(weights)};
            add_rows(sums, odd, rows + 4, row_bytes, v);
        }
#endif
    }
};

}  // namespace
