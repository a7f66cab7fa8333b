// Keys and values of 4 bits: each group of a token's numbers in one head is its minimum plus 0 to 15 steps
// (`KvPage` in kernels.h has the layout, kv_int4.py the same arithmetic in torch).
//
// Nothing is made whole again. A score is, over the groups, step * (query . integers) + minimum * (sum of the query);
// values take weights that are multiplied by their token's step first, and the minima's share is added at the end.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "online_softmax.h"
#include "products.h"
#include "vectors.h"

namespace {

// A step smaller than this counts as none, and the group as constant: the inverse could overflow. As in kv_int4.py.
constexpr float LEAST_STEP = 1e-35f;

// Where the parts of a page of one head are.
struct Int4Layout {
    static constexpr int MINIMA_BYTES = KV_PAGE * 4, STEPS_BYTES = KV_PAGE * 2;

    explicit Int4Layout(int head_dim)
        : dim(head_dim), group(head_dim % (2 * LANES) ? LANES : 2 * LANES), groups(head_dim / group) {}

    const int dim, group, groups;

    int64_t header_bytes() const { return int64_t{groups} * (MINIMA_BYTES + STEPS_BYTES); }
    int64_t page_bytes() const { return header_bytes() + int64_t{dim} * KV_PAGE / 2; }

    ES_INLINE Float16 minima(const char* page, int g) const { return load<Float16>(page + g * MINIMA_BYTES); }
    ES_INLINE int64_t steps_at(int g) const { return int64_t{groups} * MINIMA_BYTES + g * STEPS_BYTES; }
    ES_INLINE Float16 steps(const char* page, int g) const {
        return load_bf16(reinterpret_cast<const uint16_t*>(page + steps_at(g)));
    }
};

// What attention multiplies where keys and values are of 4 bits; rows are as `Row` says. As a bfloat16, 0x4300 + n is
// 128 + n, so integers need no conversion there; what is too much is taken away with the minima.
template <class RowElement>
struct Int4Pages {
    using Row = RowElement;
    using Weight = float;
    static constexpr bool IS_INT4 = true;
    static constexpr bool IN_PAIRS = sizeof(Row) == 2;
    static constexpr float EXCESS = IN_PAIRS ? 128.0f : 0.0f;
    static constexpr int64_t VALUES_VECTOR = KV_PAGE * LANES / 2;

    static int64_t page_bytes(int dim) { return Int4Layout(dim).page_bytes(); }
    // Of a row's weights: one for each group.
    static int groups(int dim) { return Int4Layout(dim).groups; }
    static int64_t values_at(int dim) { return Int4Layout(dim).header_bytes(); }

    // D += eight inputs of VECTORS vectors times rows; `place(r, v)` is where the row's inputs for a vector are.
    template <int ROWS, int VECTORS, class Place>
    static ES_INLINE void add_words(Sums<ROWS, VECTORS>& sums, const Word16 (&words)[VECTORS], const Place& place) {
        if constexpr (IN_PAIRS) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    const Word16 pairs = ((words[v] >> (4 * j)) & 0x000f000fu) | 0x43004300u;
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; r++)
                        sums.at[r][v] = dot_bf16(sums.at[r][v], pairs, load<uint32_t>(place(r, v) + 2 * j));
                }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    const Float16 integers = to_float((Int16)((words[v] >> (4 * (i / 2 + i % 2 * 4))) & 0xfu));
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; r++)
                        sums.at[r][v] = fma16(integers, splat(load<float>(place(r, v) + i)), sums.at[r][v]);
                }
        }
    }

    // Scores of ROWS rows with VECTORS pages of keys. `totals` are the rows' sums by group.
    template <int ROWS, int VECTORS, class Ahead>
    static ES_INLINE void score(Sums<ROWS, VECTORS>& sums, const Row* rows, const float* totals,
                                const char* const (&pages)[VECTORS], int dim, Ahead ahead) {
        const Int4Layout layout(dim);
        const int64_t integers = layout.header_bytes();
        for (int g = 0; g < layout.groups; g++) {
            Sums<ROWS, VECTORS> dots = {};
            for (int k = g * layout.group; k < (g + 1) * layout.group; k += 8) {
                Word16 words[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    const char* place = pages[v] + integers + k / 8 * int64_t{LANES * 4};
                    words[v] = load<Word16>(place);
                    ahead.fetch(place);
                }
                add_words(dots, words, [&](int r, int) { return rows + int64_t{r} * dim + k; });
            }
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                ahead.fetch(pages[v] + g * Int4Layout::MINIMA_BYTES);
                if (g % 2 == 0) ahead.fetch(pages[v] + layout.steps_at(g));
                const Float16 steps = layout.steps(pages[v], g);
                const Float16 minima = fma16(steps, splat(-EXCESS), layout.minima(pages[v], g));
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++) {
                    const Float16 base = fma16(minima, splat(totals[r * layout.groups + g]), sums.at[r][v]);
                    sums.at[r][v] = fma16(dots.at[r][v], steps, base);
                }
            }
        }
    }

    // A page's weights [ROWS][KEY_TILE], times the steps of each group: [ROWS][groups][KEY_TILE]. What the minima add to
    // any number of a group goes to `shares` [ROWS][groups][16], token by token.
    template <int ROWS, class Ahead>
    static ES_INLINE void weigh_page(const float* weights, Row* scaled, float* shares, const char* page, int dim,
                                     Ahead ahead) {
        const Int4Layout layout(dim);
        for (int g = 0; g < layout.groups; g++) {
            ahead.fetch(page + g * Int4Layout::MINIMA_BYTES);
            if (g % 2 == 0) ahead.fetch(page + layout.steps_at(g));
            const Float16 steps = layout.steps(page, g), minima = layout.minima(page, g);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const Float16 plain = load<Float16>(weights + int64_t{r} * KEY_TILE);
                Row* place = scaled + (int64_t{r} * layout.groups + g) * KEY_TILE;
                store_weights(place, plain * steps);
                float* share = shares + (r * layout.groups + g) * LANES;
                Float16 total = fma16(plain, minima, load<Float16>(share));
                if constexpr (IN_PAIRS) total = fma16(load_as_float(place), splat(-EXCESS), total);
                store(share, total);
            }
        }
    }

    // Sums of ROWS rows, with weights from `weigh_page`, over a page's values: VECTORS vectors of outputs from `vector` on.
    template <int ROWS, int VECTORS, class Ahead>
    static ES_INLINE void add_values(Sums<ROWS, VECTORS>& sums, const Row* scaled, const char* const (&values)[VECTORS],
                                     int vector, int dim, Ahead ahead) {
        const Int4Layout layout(dim);
        const int last = dim / LANES - 1, in_group = layout.group / LANES;
        const Row* rows[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            rows[v] = scaled + int64_t{(vector + v < last ? vector + v : last) / in_group} * KEY_TILE;
        const int64_t apart = int64_t{layout.groups} * KEY_TILE;
#pragma GCC unroll 2
        for (int half = 0; half < KV_PAGE / 8; half++) {
            Word16 words[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                words[v] = load<Word16>(values[v] + half * LANES * 4);
                ahead.fetch(values[v] + half * LANES * 4);
            }
            add_words(sums, words, [&](int r, int v) { return rows[v] + r * apart + half * 8; });
        }
    }
};

// A token's group of one head: the integers 0 to 15, with minimum and step [1]. What is not finite becomes NaN throughout.
// Every operation is one that IEEE rounds, with nothing to fuse, so that the bits are the same on every processor.
template <class From>
ES_INLINE void round_group(const From* from, int group, int32_t* integers, float* minimum, uint16_t* step) {
    float low = as_float(from[0]), high = low;
    bool finite = true;
    for (int i = 0; i < group; i++) {
        const float value = as_float(from[i]);
        low = value < low ? value : low;
        high = value > high ? value : high;
        finite &= (float_to_bits(value) & 0x7fffffffu) < 0x7f800000u;
    }
    const float range = high - low;
    finite &= (float_to_bits(range) & 0x7fffffffu) < 0x7f800000u;
    const uint16_t rounded = to_bf16(range / 15.0f);
    const float size = from_bf16(rounded);
    const bool varies = finite && size >= LEAST_STEP;
    *minimum = finite ? low + 0.0f : bits_to_float(0x7fc00000u);  // + 0: a minimum of -0 is one of 0
    *step = varies ? rounded : uint16_t{0};
    const float inverse = varies ? 1.0f / size : 0.0f;
    for (int i = 0; i < group; i++) {
        float place = varies ? (as_float(from[i]) - low) * inverse : 0.0f;
        place = place < 15.0f ? place : 15.0f;
        // Adding 1.5 * 2^23 rounds to nearest, ties to even.
        integers[i] = static_cast<int32_t>(float_to_bits(place + 12582912.0f) & 0xfu);
    }
}

// Nibble n of a word: of an even input n / 2, or an odd one, four nibbles further.
ES_INLINE int nibble_shift(int input) { return 4 * (input / 2 + input % 2 * 4); }

// As `write_token` of kv_pages.h.
template <class From>
ES_INLINE void write_int4_token(char* keys, char* values, int at, const From* key, const From* value,
                                const Int4Layout& layout) {
    if (at == 0) std::memset(values, 0, static_cast<size_t>(layout.page_bytes()));
    int32_t integers[2 * LANES];
    for (int g = 0; g < layout.groups; g++) {
        const int first = g * layout.group;
        const int64_t minimum = (g * KV_PAGE + at) * int64_t{4};
        const int64_t step = layout.steps_at(g) + at * 2;
        round_group(key + first, layout.group, integers, reinterpret_cast<float*>(keys + minimum),
                    reinterpret_cast<uint16_t*>(keys + step));
        uint32_t* words = reinterpret_cast<uint32_t*>(keys + layout.header_bytes()) + first / 8 * LANES + at;
        for (int i = 0; i < layout.group; i += 8, words += LANES) {
            uint32_t word = 0;
            for (int j = 0; j < 8; j++) word |= static_cast<uint32_t>(integers[i + j]) << nibble_shift(j);
            *words = word;
        }
        round_group(value + first, layout.group, integers, reinterpret_cast<float*>(values + minimum),
                    reinterpret_cast<uint16_t*>(values + step));
        const int shift = nibble_shift(at % 8);
        for (int i = 0; i < layout.group; i++) {
            const int output = first + i;
            uint32_t* word = reinterpret_cast<uint32_t*>(values + layout.header_bytes()) +
                             (output / LANES * 2 + at / 8) * LANES + output % LANES;
            *word = (*word & ~(0xfu << shift)) | static_cast<uint32_t>(integers[i]) << shift;
        }
    }
}

}  // namespace
