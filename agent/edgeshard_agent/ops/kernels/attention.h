// Attention over the paged KV memory, for a prompt's tokens, a draft's or a single new one alike. Keys pass in tiles with
// a running maximum, as in flash attention (Dao et al. 2022, algorithm 1), and both products are those of the linear
// layers, on keys and values as they lie in memory (`KvPage` in kernels.h).
//
// A token's bits depend on its own query and on the keys before it alone: tiles begin at fixed positions, each has a
// maximum and sums of its own, these are merged in the order of positions, and a hidden key adds an exact zero. So it
// does not matter which tokens come in one call, nor how tiles are shared among threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "layers.h"
#include "products.h"
#include "vectors.h"

namespace {

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

// By what sums so far and those of the next tile are to be multiplied; one of the two is 1.
struct Shares {
    float old, added;
};

// What one row has seen: the largest score, and the sum of weights relative to it.
struct Seen {
    float maximum, total;

    Shares add(Seen tile) {
        if (tile.maximum <= maximum) {
            const float share = exp16(splat(tile.maximum - maximum))[0];
            total = tile.total * share + total;
            return {1.0f, share};
        }
        const float share = exp16(splat(maximum - tile.maximum))[0];
        total = total * share + tile.total;
        maximum = tile.maximum;
        return {share, 1.0f};
    }
};

ES_INLINE Float16 merged(Float16 sums, Float16 added, Shares shares) {
    if (shares.added == 1.0f) return fma16(sums, splat(shares.old), added);
    return fma16(added, splat(shares.added), sums);
}

// The queries of one unit that share a KV head. Its rows are (token, head of the group).
template <class Product>
class AttentionItem {
   public:
    AttentionItem(const Attention& a, int kv_head, int unit)
        : a_(a),
          unit_(a.units[unit]),
          kv_head_(kv_head),
          group_(a.heads / a.kv_heads),
          dim_(a.head_dim),
          rows_(unit_.tokens * group_),
          row_(a.first_rows[unit_.span] + unit_.first_token),
          position_(a.lengths[unit_.span] - (a.first_rows[unit_.span + 1] - row_)),
          table_(a.block_tables + unit_.span * a.table_stride),
          partials_(a.parts > 1 ? a.partials + partial_at(kv_head, unit) : nullptr) {}

    // All of its tiles, and what comes of them. Meanwhile the first keys of the work that comes `next`, if any, are fetched.
    void run(const AttentionItem* next) {
        next_ = next;
        prepare();
        for (int tile = first_tile(); tile < tiles(); tile++) attend_tile(tile, nullptr);
        write();
    }

    // Its part of the tiles; their maxima and sums go to `partials`.
    void run_part(int part) {
        prepare();
        const int64_t first = first_tile(), count = tiles() - first;
        const int64_t end = first + count * (part + 1) / a_.parts;
        for (int64_t tile = first + count * part / a_.parts; tile < end; tile++)
            attend_tile(static_cast<int>(tile), partials_ + tile * a_.partial_stride);
    }

    // What comes of all parts.
    void merge_parts() {
        prepare();
        for (int tile = first_tile(); tile < tiles(); tile++) {
            const float* partial = partials_ + int64_t{tile} * a_.partial_stride;
            for (int r = 0; r < rows_; r++, partial += partial_width(a_)) {
                if (partial[1] == 0) continue;  // it sees none of these keys
                const Shares shares = seen_[r].add({partial[0], partial[1]});
                for (int i = 0; i < dim_; i += LANES) {
                    float* sums = sums_ + int64_t{r} * dim_ + i;
                    store(sums, merged(load<Float16>(sums), load<Float16>(partial + PARTIAL_HEAD + i), shares));
                }
            }
        }
        write();
    }

   private:
    using Row = typename Product::Row;
    static constexpr int64_t VECTOR_BYTES = LANES * 4;
    // Steps of inputs in a page of values.
    static constexpr int PAGE_STEPS = KV_PAGE / Product::STEP;

    int64_t partial_at(int kv_head, int unit) const {
        return (int64_t{kv_head} * a_.unit_count + unit) * a_.partial_tiles * a_.partial_stride;
    }

    int first_seen(int position) const {
        return a_.window > 0 && position >= a_.window ? position - a_.window + 1 : 0;
    }
    static int64_t apart(const void* from, const void* to) {
        return static_cast<const char*>(to) - static_cast<const char*>(from);
    }
    int position_of(int row) const { return position_ + row / group_; }
    int end() const { return position_ + unit_.tokens; }
    int first_tile() const { return first_seen(position_) / KEY_TILE; }
    int tiles() const { return (end() + KEY_TILE - 1) / KEY_TILE; }

    void prepare() {
        lay_out(reinterpret_cast<uintptr_t>(scratch.room(static_cast<int64_t>(lay_out(0)))));
        if (a_.element == ELEMENT_BF16)
            pack_queries<uint16_t>();
        else
            pack_queries<float>();
        for (int64_t i = 0; i < int64_t{rows_} * dim_; i += LANES) store(sums_ + i, Float16{});
        for (int r = 0; r < rows_; r++) seen_[r] = {-INFINITY, 0};
    }

    // Gives every part its place from address `next` on; returns the end.
    uintptr_t lay_out(uintptr_t next) {
        auto part = [&](auto*& pointer, int64_t count) {
            pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(next);
            next += static_cast<uintptr_t>(round_up(count * int64_t{sizeof(*pointer)}, 64));
        };
        part(sums_, int64_t{rows_} * dim_);
        part(seen_, rows_);
        part(scores_, MOST_ROWS * KEY_TILE);
        part(weights_, MOST_ROWS * KEY_TILE);
        part(queries_, int64_t{rows_} * dim_);
        return next;
    }

    template <class Q>
    void pack_queries() {
        for (int r = 0; r < rows_; r++) {
            const Q* query = static_cast<const Q*>(a_.query) + (row_ + r / group_) * a_.query_stride +
                             (kv_head_ * group_ + r % group_) * dim_;
            Row* row = queries_ + int64_t{r} * dim_;
            for (int i = 0; i < dim_; i += LANES) store_float(row + i, load_as_float(query + i));
        }
    }

    // Where the pages of a tile begin, in bytes from those of keys and of values.
    void find_pages(int tile, int64_t* offsets) const {
        const int first = tile * KEY_TILE, most = end() < first + KEY_TILE ? end() : first + KEY_TILE;
        int block = first / a_.block_tokens, within = first % a_.block_tokens;
        for (int position = first; position < most; position += KV_PAGE) {
            const int64_t page = (int64_t{table_[block]} * a_.block_tokens + within) / KV_PAGE;
            *offsets++ = (page * a_.kv_heads + kv_head_) * page_bytes();
            within += KV_PAGE;
            if (within == a_.block_tokens) within = 0, block++;
        }
    }
    int64_t page_bytes() const { return int64_t{KV_PAGE} * dim_ * int64_t{sizeof(typename Product::Panel)}; }

    // One tile of keys; with `partial` its results go there instead of to the sums.
    void attend_tile(int tile, float* partial) {
        const int first = tile * KEY_TILE;
        find_pages(tile, pages_);
        std::memcpy(next_pages_, pages_, sizeof(pages_));
        if (tile + 1 < tiles())
            find_pages(tile + 1, next_pages_);
        else if (next_)
            next_->find_pages(next_->first_tile(), next_pages_);
        // Groups of nearly equal size, as in the linear layers.
        int groups = (rows_ + MOST_ROWS - 1) / MOST_ROWS;
        for (int row = 0; groups > 0; groups--) {
            const int some = (rows_ - row + groups - 1) / groups;
            attend_some<MOST_ROWS>(some, row, first, partial);
            row += some;
        }
    }

    template <int ROWS>
    ES_INLINE void attend_some(int count, int row, int tile, float* partial) {
        if (count == ROWS) return attend_rows<ROWS>(row, tile, partial);
        if constexpr (ROWS > 1) attend_some<ROWS - 1>(count, row, tile, partial);
    }

    // ROWS rows from `row` on against the keys from position `tile` on, of which they read the pages [from, to).
    template <int ROWS>
    void attend_rows(int row, int tile, float* partial) {
        const int seen = position_of(row + ROWS - 1) + 1 - tile, unseen = first_seen(position_of(row)) - tile;
        const int to = seen < KEY_TILE ? (seen + KV_PAGE - 1) / KV_PAGE : KEY_TILE / KV_PAGE;
        const int from = unseen > 0 ? unseen / KV_PAGE : 0;
        if (to > from) make_scores<ROWS>(row, from, to);
        Shares shares[ROWS];
        bool sees[ROWS];
        for (int r = 0; r < ROWS; r++) {
            const Seen of_tile = weigh(row + r, r, tile, from * KV_PAGE, to * KV_PAGE);
            sees[r] = of_tile.total != 0;
            shares[r] = {1.0f, 1.0f};
            if (partial) {
                float* head = partial + (row + r) * partial_width(a_);
                head[0] = of_tile.maximum, head[1] = of_tile.total;
            } else if (sees[r]) {
                shares[r] = seen_[row + r].add(of_tile);
            }
        }
        if (to <= from) return;
        for (int vector = 0; vector < dim_ / LANES; vector += vectors<ROWS>())
            add_values<ROWS>(vector, from, to, [&](int r, int column, Float16 sums) {
                if (partial) {
                    store(partial + (row + r) * partial_width(a_) + PARTIAL_HEAD + column, sums);
                } else if (sees[r]) {
                    float* place = sums_ + (row + r) * int64_t{dim_} + column;
                    store(place, merged(load<Float16>(place), sums, shares[r]));
                }
            });
    }

    // Vectors of outputs whose products are made together: few rows alone would wait for each sum to be ready.
    template <int ROWS>
    static constexpr int vectors() {
        return ROWS * 4 <= MOST_ROWS * 2 ? 4 : 2;
    }

    template <int ROWS>
    ES_INLINE void make_scores(int row, int from, int to) {
        constexpr int VECTORS = vectors<ROWS>();
        const Float16 scale = splat(a_.scale);
        const char* queries = reinterpret_cast<const char*>(queries_ + int64_t{row} * dim_);
        for (int p = from; p < to; p += VECTORS) {
            const int count = to - p < VECTORS ? to - p : VECTORS;
            const char* keys[VECTORS];
            // What is missing to a whole round is computed twice and used once.
            for (int v = 0; v < VECTORS; v++) keys[v] = static_cast<const char*>(a_.keys) + pages_[v < count ? p + v : p];
            Sums<ROWS, VECTORS> sums = {};
            Product::template add<VECTOR_BYTES>(sums, queries, dim_ * int64_t{sizeof(Row)}, keys, dim_,
                                                FetchAhead{apart(a_.keys, a_.values)});
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < count; v++) store(scores_ + r * KEY_TILE + (p + v) * LANES, sums.at[r][v] * scale);
        }
    }

    // The weights of the pages [from, to) times some vectors of their values.
    template <int ROWS, class Take>
    ES_INLINE void add_values(int vector, int from, int to, const Take& take) {
        constexpr int VECTORS = vectors<ROWS>();
        const int64_t run = int64_t{PAGE_STEPS} * VECTOR_BYTES;
        const int left = dim_ / LANES - vector, count = left < VECTORS ? left : VECTORS;
        Sums<ROWS, VECTORS> sums = {};
        for (int p = from; p < to; p++) {
            const char* page = static_cast<const char*>(a_.values) + pages_[p] + vector * run;
            const char* values[VECTORS];
            for (int v = 0; v < VECTORS; v++) values[v] = page + (v < count ? v * run : 0);
            Product::template add<VECTOR_BYTES>(sums, reinterpret_cast<const char*>(weights_ + p * KV_PAGE),
                                                KEY_TILE * int64_t{sizeof(Row)}, values, KV_PAGE,
                                                FetchAhead{apart(a_.values, a_.keys) + next_pages_[p] - pages_[p]});
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < count; v++) take(r, (vector + v) * LANES, sums.at[r][v]);
    }

    // Makes weights of the scores of row `row`, the r-th of those computed together. A total of 0: it sees none.
    Seen weigh(int row, int r, int tile, int from, int to) {
        const int position = position_of(row);
        const int unseen = first_seen(position) - tile, seen = position + 1 - tile;
        const int first = unseen > from ? unseen : from, end = seen < to ? seen : to;
        float* scores = scores_ + r * KEY_TILE;
        Row* weights = weights_ + r * KEY_TILE;
        const int first_vector = first / LANES * LANES;
        int t = from;
        for (; t < first_vector && t < to; t += LANES) store_weights(weights + t, Float16{});
        Seen result = {-INFINITY, 0};
        if (first < end) {
            if (a_.softcap > 0)
                for (int i = first; i < end; i++) scores[i] = std::tanh(scores[i] / a_.softcap) * a_.softcap;
            const int end_vector = static_cast<int>(round_up(end, LANES));
            for (int i = first_vector; i < first; i++) scores[i] = -INFINITY;
            for (int i = end; i < end_vector; i++) scores[i] = -INFINITY;
            Float16 peak = splat(-INFINITY);
            for (int i = first_vector; i < end_vector; i += LANES) peak = max16(load<Float16>(scores + i), peak);
            result.maximum = max_lanes(peak);
            Float16 added = {};
            for (; t < end_vector; t += LANES) {
                Float16 values = exp16(load<Float16>(scores + t) - splat(result.maximum));
                if (t < first || t + LANES > end) {
                    for (int i = 0; i < LANES; i++)
                        if (t + i < first || t + i >= end) values[i] = 0;
                }
                store_weights(weights + t, values);
                added += values;
            }
            result.total = sum_lanes(added);
        }
        for (; t < to; t += LANES) store_weights(weights + t, Float16{});
        return result;
    }

    void write() {
        for (int r = 0; r < rows_; r++) {
            const int head = kv_head_ * group_ + r % group_;
            Shares shares = {1.0f, 1.0f};
            if (a_.sinks) shares = seen_[r].add({a_.sinks[head], 1.0f});
            const float share = shares.old / seen_[r].total;
            const int64_t place = (row_ + r / group_) * a_.out_stride + int64_t{head} * dim_;
            for (int i = 0; i < dim_; i += LANES) {
                const Float16 values = load<Float16>(sums_ + int64_t{r} * dim_ + i) * splat(share);
                if (a_.element == ELEMENT_BF16)
                    store_float(static_cast<uint16_t*>(a_.out) + place + i, values);
                else
                    store_float(static_cast<float*>(a_.out) + place + i, values);
            }
        }
    }

    const Attention& a_;
    const AttentionUnit unit_;
    const int kv_head_, group_, dim_, rows_, row_, position_;
    const int32_t* table_;
    const AttentionItem* next_ = nullptr;
    float* partials_;
    float *sums_, *scores_;
    Seen* seen_;
    Row *weights_, *queries_;
    int64_t pages_[KEY_TILE / KV_PAGE], next_pages_[KEY_TILE / KV_PAGE];
};

template <class Product>
void attend(const Attention& a, int first, int end) {
    auto item_of = [&](int whole) { return AttentionItem<Product>(a, whole / a.unit_count, whole % a.unit_count); };
    for (int item = first; item < end; item++) {
        if (a.parts > 1) {
            item_of(item / a.parts).run_part(item % a.parts);
            continue;
        }
        const bool is_last = item + 1 == end;
        const AttentionItem<Product> next = item_of(is_last ? item : item + 1);
        item_of(item).run(is_last ? nullptr : &next);
    }
}

template <class Product>
void merge(const Attention& a, int first, int end) {
    for (int item = first; item < end; item++)
        AttentionItem<Product>(a, item / a.unit_count, item % a.unit_count).merge_parts();
}

ES_INLINE void put_pair(uint32_t* word, const uint16_t* from) { *word = load<uint32_t>(from); }
ES_INLINE void put_pair(uint32_t* word, const float* from) {
    *word = to_bf16(from[0]) | static_cast<uint32_t>(to_bf16(from[1])) << 16;
}

// One token's key and value of a head, at place `at` of a page. The first token of a page clears what lies behind it:
// attention multiplies it by zero, and what another request left there may be infinite.
template <class From>
ES_INLINE void write_token(float* keys, float* values, int at, const From* key, const From* value, int dim) {
    if (at == 0) std::memset(values, 0, sizeof(float) * KV_PAGE * static_cast<size_t>(dim));
    for (int i = 0; i < dim; i++) keys[i * KV_PAGE + at] = as_float(key[i]);
    for (int i = 0; i < dim; i += LANES)
        store(values + i * KV_PAGE + at * LANES, load_as_float(value + i));
}

template <class From>
ES_INLINE void write_token(uint16_t* keys, uint16_t* values, int at, const From* key, const From* value, int dim) {
    if (at == 0) std::memset(values, 0, sizeof(uint16_t) * KV_PAGE * static_cast<size_t>(dim));
    for (int i = 0; i < dim; i += 2)
        put_pair(reinterpret_cast<uint32_t*>(keys) + i / 2 * KV_PAGE + at, key + i);
    for (int i = 0; i < dim; i += LANES) {
        uint16_t halves[LANES];
        store_bf16(halves, load_as_float(value + i));
        Word16 words;
        for (int j = 0; j < LANES; j++) words[j] = halves[j];
        uint16_t* place = values + i * KV_PAGE + at / 2 * 2 * LANES;
        const Word16 pairs = load<Word16>(place);
        store(place, at % 2 ? (pairs & 0xffffu) | (words << 16) : (pairs & 0xffff0000u) | words);
    }
}

template <class From, class To>
void write_heads(const Attention& a, int first_head, int end_head) {
    const int dim = a.head_dim;
    for (int head = first_head; head < end_head; head++)
        for (int s = 0; s < a.spans; s++) {
            const int32_t* table = a.block_tables + s * a.table_stride;
            for (int row = a.first_rows[s]; row < a.first_rows[s + 1]; row++) {
                const int position = a.lengths[s] - (a.first_rows[s + 1] - row);
                const int64_t slot = int64_t{table[position / a.block_tokens]} * a.block_tokens + position % a.block_tokens;
                const int64_t place = (slot / KV_PAGE * a.kv_heads + head) * KV_PAGE * dim;
                const int64_t from = row * a.new_stride + int64_t{head} * dim;
                write_token(static_cast<To*>(a.keys) + place, static_cast<To*>(a.values) + place,
                            static_cast<int>(slot % KV_PAGE), static_cast<const From*>(a.new_keys) + from,
                            static_cast<const From*>(a.new_values) + from, dim);
            }
        }
}

}  // namespace
