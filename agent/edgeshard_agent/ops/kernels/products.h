// Products of rows with a packed panel of 32 outputs: what linear layers and prefill attention are made of.
#pragma once

#include "vectors.h"

namespace {

constexpr int PANEL = 2 * LANES;
// The rows computed together: as many as leave registers for their sums. Fewer where vectors are several registers.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;
#else
constexpr int MOST_ROWS = 3;
#endif

template <int ROWS>
struct Sums {
    Float16 at[ROWS][2];
};

// `rows` of `depth` numbers, `row_bytes` apart, times one panel.

struct Fp32Product {
    using Element = float;
    static constexpr int STEP = 1;  // inputs in one vector of a panel

    template <int ROWS>
    static ES_INLINE Sums<ROWS> sums(const char* rows, int64_t row_bytes, const char* panel, int64_t depth) {
        Sums<ROWS> sums = {};
        for (int64_t k = 0; k < depth; k++, panel += 128, rows += 4) {
            Float16 w[2] = {load<Float16>(panel), load<Float16>(panel + 64)};
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                Float16 value = splat(load<float>(rows + r * row_bytes));
                for (int p = 0; p < 2; p++) sums.at[r][p] = fma16(w[p], value, sums.at[r][p]);
            }
        }
        return sums;
    }
};

struct Bf16Product {
    using Element = uint16_t;
    static constexpr int STEP = 2;

    template <int ROWS>
    static ES_INLINE Sums<ROWS> sums(const char* rows, int64_t row_bytes, const char* panel, int64_t depth) {
        Sums<ROWS> sums = {};
        for (int64_t k = 0; k < depth; k += 2, panel += 128, rows += 4) {
            Word16 w[2] = {load<Word16>(panel), load<Word16>(panel + 64)};
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                uint32_t pair = load<uint32_t>(rows + r * row_bytes);
                for (int p = 0; p < 2; p++) sums.at[r][p] = dot_bf16(sums.at[r][p], w[p], pair);
            }
        }
        return sums;
    }
};

}  // namespace
