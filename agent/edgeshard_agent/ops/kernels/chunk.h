// Prefill attention: several consecutive new tokens of one request. Keys pass in tiles with a running maximum, as in
// flash attention (Dao et al. 2022, algorithm 1), and both products run as those of the linear layers do, on tiles packed
// into panels. Tiles begin at fixed positions and a hidden key adds an exact zero, so that a token's numbers are the
// same in whichever chunk it comes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "kernels.h"
#include "layers.h"
#include "products.h"
#include "vectors.h"

namespace {

// Keys and values that are packed at once, to stay in the second-level cache while the queries of an item pass.
constexpr int KEY_TILE = 256;
// What MOST_ROWS leaves over is done by so many, padded with rows of zeros.
constexpr int FEW_ROWS = MOST_ROWS / 3;

ES_INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Memory that one thread keeps between calls. (A container of the standard library would bring functions that the
// linker shares: see vectors.h.)
class Scratch {
   public:
    ~Scratch() { std::free(memory_); }

    char* room(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            memory_ = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))));
            if (!memory_) std::abort();
            size_ = bytes;
        }
        return memory_;
    }

   private:
    char* memory_ = nullptr;
    int64_t size_ = 0;
};
thread_local Scratch scratch;

// The attention weights of a vector of keys, all between 0 and 1.
ES_INLINE void store_weights(float* address, Float16 weights) { store(address, weights); }
ES_INLINE void store_weights(uint16_t* address, Float16 weights) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), (__m256i)_mm512_cvtneps_pbh((__m512)weights));
#else
    store_bf16(address, weights);
#endif
}

// One item of work: a block of query tokens with the heads of one KV head. Its rows are (token, head of the group).
template <class Product, class Q, class KV>
class ChunkItem {
   public:
    ChunkItem(const Attention& a, int kv_head, int block)
        : a_(a),
          group_(a.heads / a.kv_heads),
          dim_(a.head_dim),
          sums_width_(static_cast<int>(round_up(a.head_dim, PANEL))),
          first_token_(block * chunk_block_tokens(a)),
          tokens_(a.rows - first_token_ < chunk_block_tokens(a) ? a.rows - first_token_ : chunk_block_tokens(a)),
          rows_(static_cast<int>(round_up(tokens_ * group_, FEW_ROWS))),
          first_head_(kv_head * group_),
          position_(a.lengths[0] - a.rows + first_token_),
          keys_(static_cast<const KV*>(a.keys) + kv_head * dim_),
          values_(static_cast<const KV*>(a.values) + kv_head * dim_) {}

    void run() {
        lay_out(reinterpret_cast<uintptr_t>(scratch.room(static_cast<int64_t>(lay_out(0)))));
        pack_queries();
        for (int64_t i = 0; i < int64_t{rows_} * sums_width_; i += LANES) store(sums_ + i, Float16{});
        for (int r = 0; r < rows_; r++) maximum_[r] = -INFINITY, total_[r] = 0;
        const int end = position_ + tokens_;
        for (int tile = first_seen(position_) / KEY_TILE * KEY_TILE; tile < end; tile += KEY_TILE) {
            pack_tile(tile, end - tile < KEY_TILE ? end - tile : KEY_TILE);
            int row = 0;
            for (; row + MOST_ROWS <= rows_; row += MOST_ROWS) attend_rows<MOST_ROWS>(row, tile);
            for (; row < rows_; row += FEW_ROWS) attend_rows<FEW_ROWS>(row, tile);
        }
        write();
    }

   private:
    using Element = typename Product::Element;

    // Gives every part its place from address `next` on; returns the end. The second half of a last panel of values may
    // stay unset: its products are not read.
    uintptr_t lay_out(uintptr_t next) {
        auto part = [&](auto*& pointer, int64_t count) {
            pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(next);
            next += static_cast<uintptr_t>(round_up(count * int64_t{sizeof(*pointer)}, 64));
        };
        part(sums_, int64_t{rows_} * sums_width_);
        part(maximum_, rows_);
        part(total_, rows_);
        part(scores_, MOST_ROWS * KEY_TILE);
        part(weights_, MOST_ROWS * KEY_TILE);
        part(queries_, int64_t{rows_} * dim_);
        part(key_panels_, KEY_TILE * dim_);
        part(value_panels_, KEY_TILE * sums_width_);
        return next;
    }

    int first_seen(int position) const {
        return a_.window > 0 && position >= a_.window ? position - a_.window + 1 : 0;
    }
    int position_of(int row) const { return position_ + (row < tokens_ * group_ ? row / group_ : tokens_ - 1); }

    void pack_queries() {
        for (int r = 0; r < tokens_ * group_; r++) {
            const Q* query = static_cast<const Q*>(a_.query) + (first_token_ + r / group_) * a_.query_stride +
                             (first_head_ + r % group_) * dim_;
            Element* row = queries_ + int64_t{r} * dim_;
            for (int i = 0; i < dim_; i += LANES) store_float(row + i, load_as_float(query + i));
        }
        for (int64_t i = int64_t{tokens_} * group_ * dim_; i < int64_t{rows_} * dim_; i++) queries_[i] = 0;
    }

    // `count` tokens from position `tile` on; up to a whole panel, zeros stand for those behind them.
    void pack_tile(int tile, int count) {
        const int64_t slot_stride = static_cast<int64_t>(a_.kv_heads) * dim_;
        const int padded = static_cast<int>(round_up(count, PANEL));
        int64_t offsets[KEY_TILE];
        int block = tile / a_.block_tokens, within = tile % a_.block_tokens;
        for (int t = 0; t < count; t++) {
            offsets[t] = (static_cast<int64_t>(a_.block_tables[block]) * a_.block_tokens + within) * slot_stride;
            if (++within == a_.block_tokens) within = 0, block++;
        }
        static const KV nothing[MOST_HEAD_DIM] = {};
        auto at = [&](const KV* arena, int t) { return t < count ? arena + offsets[t] : nothing; };
        for (int t = 0; t < padded; t += LANES) {
            const KV* keys[LANES];
            for (int i = 0; i < LANES; i++) keys[i] = at(keys_, t + i);
            pack_keys(t, keys);
        }
        for (int t = 0; t < padded; t += Product::STEP) pack_values(t, at(values_, t), at(values_, t + 1));
    }

    // Outputs of the first product are tokens, its inputs the head's dimensions. A word is what stands for one output and
    // step.
    void pack_keys(int token, const KV* const (&keys)[LANES]) {
        constexpr int STEP = Product::STEP;
        const int words = dim_ / STEP;
        char* out = reinterpret_cast<char*>(key_panels_ + int64_t{token / PANEL} * PANEL * dim_) + token % PANEL * 4;
        for (int first = 0; first < words; first += LANES) {
            const int count = words - first < LANES ? words - first : LANES;
            Word16 rows[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) rows[i] = words_of(keys[i] + first * STEP, count);
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                if (i < count) store(out + (first + i) * int64_t{PANEL} * 4, rows[i]);
        }
    }

    static ES_INLINE Word16 words_of(const KV* key, int count) {
        if constexpr (Product::STEP == 1) return (Word16)load_as_float(key);
        if (count == LANES) return load<Word16>(key);
        Word16 words = {};
        std::memcpy(&words, key, LANES * 2);  // heads are whole vectors of elements
        return words;
    }

    // Outputs of the second product are the head's dimensions, its inputs tokens, by twos if the product takes pairs.
    void pack_values(int token, const KV* value, [[maybe_unused]] const KV* next) {
        char* out = reinterpret_cast<char*>(value_panels_ + int64_t{token} * PANEL);
        for (int i = 0; i < dim_; i += LANES) {
            char* place = out + int64_t{i / PANEL} * PANEL * KEY_TILE * sizeof(Element) + i % PANEL * 4;
            Float16 values = load_as_float(value + i);
            if constexpr (Product::STEP == 2)
                store(place, ((Word16)values >> 16) | (Word16)load_as_float(next + i));
            else
                store(place, values);
        }
    }

    // ROWS rows from `row` on against the keys of a tile, of which they read [from, to).
    template <int ROWS>
    void attend_rows(int row, int tile) {
        const int seen = position_of(row + ROWS - 1) + 1 - tile, unseen = first_seen(position_of(row)) - tile;
        const int to = seen < KEY_TILE ? static_cast<int>(round_up(seen, LANES)) : KEY_TILE;
        const int from = unseen > 0 ? unseen / PANEL * PANEL : 0;
        if (to <= from) return;
        const int64_t query_bytes = dim_ * int64_t{sizeof(Element)}, weight_bytes = KEY_TILE * int64_t{sizeof(Element)};
        for (int t = from; t < to; t += PANEL) {
            Sums<ROWS> products = Product::template sums<ROWS>(
                reinterpret_cast<const char*>(queries_ + int64_t{row} * dim_), query_bytes,
                reinterpret_cast<const char*>(key_panels_ + int64_t{t} * dim_), dim_);
            for (int r = 0; r < ROWS; r++)
                for (int p = 0; p < 2; p++)
                    store(scores_ + r * KEY_TILE + t + p * LANES, products.at[r][p] * splat(a_.scale));
        }
        float shrink[ROWS];
        for (int r = 0; r < ROWS; r++) shrink[r] = weigh(row, r, tile, from, to);
        for (int i = 0; i < sums_width_; i += PANEL) {
            Sums<ROWS> products = Product::template sums<ROWS>(
                reinterpret_cast<const char*>(weights_ + from), weight_bytes,
                reinterpret_cast<const char*>(value_panels_ + int64_t{i} * KEY_TILE + int64_t{from} * PANEL), to - from);
            for (int r = 0; r < ROWS; r++)
                for (int p = 0; p < 2; p++) {
                    float* sums = sums_ + (row + r) * int64_t{sums_width_} + i + p * LANES;
                    store(sums, fma16(load<Float16>(sums), splat(shrink[r]), products.at[r][p]));
                }
        }
    }

    // Makes weights of the scores of row `first_row + r`, and returns by what its sums so far are to be multiplied.
    float weigh(int first_row, int r, int tile, int from, int to) {
        const int row = first_row + r, position = position_of(row);
        const int unseen = first_seen(position) - tile, seen = position + 1 - tile;
        const int first = unseen > from ? unseen : from, end = seen < to ? seen : to;
        float* scores = scores_ + r * KEY_TILE;
        Element* weights = weights_ + r * KEY_TILE;
        const int first_vector = first / LANES * LANES;
        int t = from;
        for (; t < first_vector && t < to; t += LANES) store_weights(weights + t, Float16{});
        float shrink = 1.0f;
        if (first < end) {
            if (a_.softcap > 0)
                for (int i = first; i < end; i++) scores[i] = std::tanh(scores[i] / a_.softcap) * a_.softcap;
            const int end_vector = static_cast<int>(round_up(end, LANES));
            for (int i = first_vector; i < first; i++) scores[i] = -INFINITY;
            for (int i = end; i < end_vector; i++) scores[i] = -INFINITY;
            Float16 peak = splat(maximum_[row]);
            for (int i = first_vector; i < end_vector; i += LANES) peak = max16(load<Float16>(scores + i), peak);
            const float maximum = max_lanes(peak);
            shrink = exp16(splat(maximum_[row] - maximum))[0];
            maximum_[row] = maximum;
            Float16 added = {};
            for (; t < end_vector; t += LANES) {
                Float16 values = exp16(load<Float16>(scores + t) - splat(maximum));
                if (t < first || t + LANES > end) {
                    for (int i = 0; i < LANES; i++)
                        if (t + i < first || t + i >= end) values[i] = 0;
                }
                store_weights(weights + t, values);
                added += values;
            }
            total_[row] = total_[row] * shrink + sum_lanes(added);
        }
        for (; t < to; t += LANES) store_weights(weights + t, Float16{});
        return shrink;
    }

    void write() {
        for (int r = 0; r < tokens_ * group_; r++) {
            Q* out = static_cast<Q*>(a_.out) + (first_token_ + r / group_) * a_.out_stride +
                     (first_head_ + r % group_) * dim_;
            const Float16 share = splat(1.0f / total_[r]);
            for (int i = 0; i < dim_; i += LANES)
                store_float(out + i, load<Float16>(sums_ + int64_t{r} * sums_width_ + i) * share);
        }
    }

    const Attention& a_;
    const int group_, dim_, sums_width_, first_token_, tokens_, rows_, first_head_, position_;
    const KV *keys_, *values_;
    float *sums_, *maximum_, *total_, *scores_;
    Element *weights_, *queries_, *key_panels_, *value_panels_;
};

// Numbers that are not bfloat16 throughout, or that the processor cannot multiply as such, are multiplied as float32.
template <class Q, class KV>
struct ChunkProduct {
    using type = Fp32Product;
};
#if defined(__AVX512BF16__)
template <>
struct ChunkProduct<uint16_t, uint16_t> {
    using type = Bf16Product;
};
#endif

template <class Q, class KV>
void attend_chunk(const Attention& a, int first, int end) {
    const int blocks = chunk_blocks(a);
    for (int item = first; item < end; item++)
        ChunkItem<typename ChunkProduct<Q, KV>::type, Q, KV>(a, item / blocks, item % blocks).run();
}

}  // namespace
