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
#include "kv_int4.h"
#include "layers.h"
#include "online_softmax.h"
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

// Keys and values as they are: what attention multiplies, by one of the products.
template <class Product>
struct PlainPages {
    using Row = typename Product::Row;
    using Weight = Row;
    static constexpr bool IS_INT4 = false;
    static constexpr int64_t VECTOR_BYTES = LANES * 4;
    static constexpr int64_t VALUES_VECTOR = int64_t{KV_PAGE / Product::STEP} * VECTOR_BYTES;

    static int64_t page_bytes(int dim) { return int64_t{KV_PAGE} * dim * int64_t{sizeof(typename Product::Panel)}; }
    static int groups(int) { return 1; }
    static int64_t values_at(int) { return 0; }

    template <int ROWS, int VECTORS, class Ahead>
    static ES_INLINE void score(Sums<ROWS, VECTORS>& sums, const Row* rows, const float*,
                                const char* const (&pages)[VECTORS], int dim, Ahead ahead) {
        Product::template add<VECTOR_BYTES>(sums, reinterpret_cast<const char*>(rows), dim * int64_t{sizeof(Row)}, pages,
                                            dim, ahead);
    }

    template <int ROWS, int VECTORS, class Ahead>
    static ES_INLINE void add_values(Sums<ROWS, VECTORS>& sums, const Row* weights, const char* const (&values)[VECTORS],
                                     int, int, Ahead ahead) {
        Product::template add<VECTOR_BYTES>(sums, reinterpret_cast<const char*>(weights),
                                            KEY_TILE * int64_t{sizeof(Row)}, values, KV_PAGE, ahead);
    }
};

// A run of pages of a tile.
struct PageRun {
    int from, to;

    bool is_empty() const { return to <= from; }
};

// The queries of one unit that share some KV heads. Its rows are (KV head, token, head of the group).
template <class Pages>
class AttentionItem {
   public:
    AttentionItem(const Attention& a, int kv_head, int kv_heads, int unit)
        : a_(a),
          unit_(a.units[unit]),
          unit_index_(unit),
          kv_head_(kv_head),
          kv_heads_(kv_heads),
          group_(a.heads / a.kv_heads),
          dim_(a.head_dim),
          groups_(Pages::groups(a.head_dim)),
          rows_(unit_.tokens * group_),
          row_(a.first_rows[unit_.span] + unit_.first_token),
          position_(a.lengths[unit_.span] - (a.first_rows[unit_.span + 1] - row_)),
          table_(a.block_tables + unit_.span * a.table_stride) {}

    // Whether the rows of a unit may be of several KV heads.
    static bool takes_heads_together(const Attention& a, int unit) {
        return a.units[unit].tokens * (a.heads / a.kv_heads) <= TOGETHER;
    }

    // All of its tiles, and what comes of them. Meanwhile the first keys of the work that comes `next`, if any, are fetched.
    void run(const AttentionItem* next) {
        next_ = next;
        prepare();
        for (int tile = first_tile(); tile < tiles(); tile++) attend_tile(tile);
        write();
    }

    // Its part of the tiles; what comes of each goes to `partials`.
    void run_part(int part) {
        is_part_ = true;
        prepare();
        const int64_t first = first_tile(), count = tiles() - first;
        const int64_t end = first + count * (part + 1) / a_.parts;
        for (int64_t tile = first + count * part / a_.parts; tile < end; tile++) attend_tile(static_cast<int>(tile));
    }

    // What comes of all parts.
    void merge_parts() {
        prepare();
        for (int tile = first_tile(); tile < tiles(); tile++)
            for (int r = 0; r < rows_; r++) merge(r, partial(0, r, tile));
        write();
    }

   private:
    using Row = typename Pages::Row;
    // The most rows of one KV head that several heads are taken together with.
    static constexpr int TOGETHER = MOST_ROWS * 2 / 3;
    // How far ahead of the heads taken together memory is read.
    static constexpr int64_t FETCHED_BYTES = 8 << 10;

    int first_seen(int position) const {
        return a_.window > 0 && position >= a_.window ? position - a_.window + 1 : 0;
    }
    static int64_t apart(const void* from, const void* to) {
        return static_cast<const char*>(to) - static_cast<const char*>(from);
    }
    // Of a row of any head.
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
        for (int64_t i = 0; i < int64_t{kv_heads_} * rows_ * dim_; i += LANES) store(sums_ + i, Float16{});
        for (int r = 0; r < kv_heads_ * rows_; r++) seen_[r] = {-INFINITY, 0};
    }

    // Gives every part its place from address `next` on; returns the end.
    uintptr_t lay_out(uintptr_t next) {
        auto part = [&](auto*& pointer, int64_t count) {
            pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(next);
            next += static_cast<uintptr_t>(round_up(count * int64_t{sizeof(*pointer)}, 64));
        };
        const int64_t rows = int64_t{kv_heads_} * rows_, at_once = kv_heads_ > 1 ? rows : MOST_ROWS;
        part(sums_, rows * dim_);
        part(seen_, rows);
        part(scores_, at_once * KEY_TILE);
        part(weights_, at_once * groups_ * KEY_TILE);
        part(results_, at_once * result_width(a_));
        part(queries_, rows * dim_);
        if constexpr (Pages::IS_INT4) {
            part(totals_, rows * groups_);
            part(shares_, at_once * groups_ * LANES);
        }
        return next;
    }

    template <class Q>
    void pack_queries() {
        for (int h = 0; h < kv_heads_; h++)
            for (int r = 0; r < rows_; r++) {
                const Q* query = static_cast<const Q*>(a_.query) + (row_ + r / group_) * a_.query_stride +
                                 ((kv_head_ + h) * group_ + r % group_) * dim_;
                Row* row = queries_ + (int64_t{h} * rows_ + r) * dim_;
                for (int i = 0; i < dim_; i += LANES) store_float(row + i, load_as_float(query + i));
                if constexpr (Pages::IS_INT4) add_up(row, totals_ + (int64_t{h} * rows_ + r) * groups_);
            }
    }

    // A query's sum over each group of its numbers.
    void add_up(const Row* row, float* totals) const {
        for (int g = 0, group = dim_ / groups_; g < groups_; g++) {
            Float16 total = {};
            for (int i = 0; i < group; i += LANES) total += load_as_float(row + g * group + i);
            totals[g] = sum_lanes(total);
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
    int64_t page_bytes() const { return Pages::page_bytes(dim_); }

    // The pages of a tile that begins at position `tile` of which some of `count` rows from `row` on see keys.
    PageRun pages_of(int row, int count, int tile) const {
        const int seen = position_of(row + count - 1) + 1 - tile, unseen = first_seen(position_of(row)) - tile;
        return {unseen > 0 ? unseen / KV_PAGE : 0,
                seen < KEY_TILE ? (seen + KV_PAGE - 1) / KV_PAGE : KEY_TILE / KV_PAGE};
    }

    float* partial(int head, int row, int tile) const {
        const int64_t item = int64_t{kv_head_ + head} * a_.unit_count + unit_index_;
        return a_.partials + (item * a_.partial_tiles + tile) * a_.partial_stride + row * result_width(a_);
    }

    // What a row of the tile at hand comes to: its largest score, the sum of its weights, and its weights times values.
    float* result(int head, int row, int r, int tile) const {
        return is_part_ ? partial(head, row + r, tile) : results_ + (head * rows_ + r) * result_width(a_);
    }

    void attend_tile(int tile) {
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
            attend_some<MOST_ROWS>(some, row, tile);
            row += some;
        }
    }

    template <int ROWS>
    ES_INLINE void attend_some(int count, int row, int tile) {
        if (count == ROWS) return attend_rows<ROWS>(row, tile);
        if constexpr (ROWS > 1) attend_some<ROWS - 1>(count, row, tile);
    }

    // ROWS rows of each head, from `row` on, against the keys of a tile.
    template <int ROWS>
    void attend_rows(int row, int tile) {
        const PageRun pages = pages_of(row, ROWS, tile * KEY_TILE);
        const bool together = ROWS <= TOGETHER && kv_heads_ > 1;
        if (!pages.is_empty()) {
            if (!together)
                score_pages<ROWS>(row, pages);
            else if constexpr (ROWS <= TOGETHER)
                score_heads<ROWS>(pages);
        }
        for (int h = 0; h < kv_heads_; h++)
            for (int r = 0; r < ROWS; r++) {
                const Seen seen = weigh(row + r, h * ROWS + r, tile * KEY_TILE, pages);
                float* head = result(h, row, r, tile);
                head[0] = seen.maximum, head[1] = seen.total;
            }
        if (!pages.is_empty()) {
            if (!together)
                add_values<ROWS>(row, pages, tile);
            else if constexpr (ROWS <= TOGETHER)
                add_values_of_heads<ROWS>(pages, tile);
        }
        if (is_part_) return;
        for (int h = 0; h < kv_heads_; h++)
            for (int r = 0; r < ROWS; r++) merge(h * rows_ + row + r, result(h, row, r, tile));
    }

    void merge(int row, const float* result) {
        if (result[1] == 0) return;  // it sees none of these keys
        const Shares shares = seen_[row].add({result[0], result[1]});
        for (int i = 0; i < dim_; i += LANES) {
            float* sums = sums_ + int64_t{row} * dim_ + i;
            store(sums, merged(load<Float16>(sums), load<Float16>(result + RESULT_HEAD + i), shares));
        }
    }

    // Vectors of outputs whose products are made together: few rows alone would wait for each sum to be ready.
    template <int ROWS>
    static constexpr int vectors() {
        return vectors_with(ROWS, 4);
    }

    template <int ROWS>
    ES_INLINE void score_pages(int row, PageRun pages) {
        constexpr int VECTORS = vectors<ROWS>();
        for (int p = pages.from; p < pages.to; p += VECTORS) {
            const int count = pages.to - p < VECTORS ? pages.to - p : VECTORS;
            const char* keys[VECTORS];
            // What is missing to a whole round is computed twice and used once.
            for (int v = 0; v < VECTORS; v++) keys[v] = static_cast<const char*>(a_.keys) + pages_[v < count ? p + v : p];
            Sums<ROWS, VECTORS> sums = {};
            Pages::score(sums, queries_ + int64_t{row} * dim_, totals_ + int64_t{row} * groups_, keys, dim_,
                         FetchAhead{apart(a_.keys, a_.values)});
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < count; v++) store_scores(r, p + v, sums.at[r][v]);
        }
    }

    template <int ROWS>
    ES_INLINE void add_values(int row, PageRun pages, int tile) {
        constexpr int VECTORS = vectors<ROWS>();
        const int64_t run = Pages::VALUES_VECTOR;
        if constexpr (Pages::IS_INT4) {
            std::memset(shares_, 0, sizeof(float) * ROWS * static_cast<size_t>(groups_ * LANES));
            for (int p = pages.from; p < pages.to; p++)
                Pages::template weigh_page<ROWS>(scores_ + p * KV_PAGE, weights_ + p * KV_PAGE, shares_,
                                                 static_cast<const char*>(a_.values) + pages_[p], dim_, NothingAhead{});
        }
        for (int vector = 0; vector < dim_ / LANES; vector += VECTORS) {
            const int left = dim_ / LANES - vector, count = left < VECTORS ? left : VECTORS;
            Sums<ROWS, VECTORS> sums = {};
            for (int p = pages.from; p < pages.to; p++) {
                const char* page = static_cast<const char*>(a_.values) + pages_[p] + Pages::values_at(dim_) + vector * run;
                const char* values[VECTORS];
                for (int v = 0; v < VECTORS; v++) values[v] = page + (v < count ? v * run : 0);
                Pages::add_values(sums, weights_ + p * KV_PAGE, values, vector, dim_,
                                  FetchAhead{apart(a_.values, a_.keys) + next_pages_[p] - pages_[p]});
            }
            for (int r = 0; r < ROWS; r++) {
                float* place = result(0, row, r, tile) + RESULT_HEAD + vector * LANES;
                for (int v = 0; v < count; v++) store(place + v * LANES, sums.at[r][v]);
            }
        }
        if constexpr (Pages::IS_INT4)
            for (int r = 0; r < ROWS; r++) add_minima(result(0, row, r, tile) + RESULT_HEAD, r);
    }

    // What the minima add to the sums of a row, the r-th of those computed together.
    void add_minima(float* sums, int r) const {
        for (int g = 0, group = dim_ / groups_; g < groups_; g++) {
            const Float16 share = splat(sum_lanes(load<Float16>(shares_ + (r * groups_ + g) * LANES)));
            for (int i = g * group; i < (g + 1) * group; i += LANES) store(sums + i, load<Float16>(sums + i) + share);
        }
    }

    // The same for all heads, page after page and one vector after the other, as they lie in memory: the processor
    // foresees such a single stream, and reading is what few rows wait for. What comes a few heads later is fetched, since
    // the next page may lie anywhere.
    template <int ROWS>
    ES_INLINE void score_heads(PageRun pages) {
        for (int p = pages.from; p < pages.to; p++) {
            const char* keys[] = {static_cast<const char*>(a_.keys) + pages_[p]};
            const int64_t next = p + 1 < pages.to ? pages_[p + 1] : apart(a_.keys, a_.values) + pages_[pages.from];
            for (int head = 0; head < kv_heads_; head++, keys[0] += page_bytes()) {
                Sums<ROWS, 1> sums = {};
                Pages::score(sums, queries_ + int64_t{head} * ROWS * dim_, totals_ + int64_t{head} * ROWS * groups_, keys,
                             dim_, few_heads_on(head, next - pages_[p]));
                for (int r = 0; r < ROWS; r++) store_scores(head * ROWS + r, p, sums.at[r][0]);
            }
        }
    }

    template <int ROWS>
    ES_INLINE void add_values_of_heads(PageRun pages, int tile) {
        const int64_t run = Pages::VALUES_VECTOR, width = result_width(a_);
        if constexpr (Pages::IS_INT4)
            std::memset(shares_, 0, sizeof(float) * static_cast<size_t>(kv_heads_ * ROWS * groups_ * LANES));
        for (int p = pages.from; p < pages.to; p++) {
            const char* values[] = {static_cast<const char*>(a_.values) + pages_[p]};
            const int64_t next = p + 1 < pages.to ? pages_[p + 1] : apart(a_.values, a_.keys) + next_pages_[0];
            for (int head = 0; head < kv_heads_; head++) {
                const auto ahead = few_heads_on(head, next - pages_[p]);
                Row* weights = weights_ + int64_t{head} * ROWS * groups_ * KEY_TILE + p * KV_PAGE;
                if constexpr (Pages::IS_INT4)
                    Pages::template weigh_page<ROWS>(scores_ + int64_t{head} * ROWS * KEY_TILE + p * KV_PAGE, weights,
                                                     shares_ + int64_t{head} * ROWS * groups_ * LANES, values[0], dim_,
                                                     ahead);
                values[0] += Pages::values_at(dim_);
                float* place = result(head, 0, 0, tile) + RESULT_HEAD;
                for (int vector = 0; vector < dim_ / LANES; vector++, place += LANES, values[0] += run) {
                    Sums<ROWS, 1> sums = {};
                    if (p > pages.from)
                        for (int r = 0; r < ROWS; r++) sums.at[r][0] = load<Float16>(place + r * width);
                    Pages::add_values(sums, weights, values, vector, dim_, ahead);
                    for (int r = 0; r < ROWS; r++) store(place + r * width, sums.at[r][0]);
                }
            }
        }
        if constexpr (Pages::IS_INT4)
            for (int head = 0; head < kv_heads_; head++)
                for (int r = 0; r < ROWS; r++) add_minima(result(head, 0, r, tile) + RESULT_HEAD, head * ROWS + r);
    }

    // The same place of the head some FETCHED_BYTES later; `next` is how far the next page is.
    FetchNext few_heads_on(int head, int64_t next) const {
        const int wanted = static_cast<int>((FETCHED_BYTES + page_bytes() - 1) / page_bytes());
        const int heads = wanted < kv_heads_ ? wanted : kv_heads_;
        return {(head + heads < kv_heads_ ? 0 : next - kv_heads_ * page_bytes()) + heads * page_bytes()};
    }

    ES_INLINE void store_scores(int row, int page, Float16 scores) {
        store(scores_ + row * KEY_TILE + page * KV_PAGE, scores * splat(a_.scale));
    }

    // Makes weights of the scores of row `row`, the r-th of those computed together. A total of 0: it sees none.
    Seen weigh(int row, int r, int tile, PageRun pages) {
        const int position = position_of(row), from = pages.from * KV_PAGE, to = pages.to * KV_PAGE;
        const int unseen = first_seen(position) - tile, seen = position + 1 - tile;
        const int first = unseen > from ? unseen : from, end = seen < to ? seen : to;
        float* scores = scores_ + r * KEY_TILE;
        typename Pages::Weight* weights;
        if constexpr (Pages::IS_INT4)
            weights = scores;  // before they are multiplied by steps
        else
            weights = weights_ + r * KEY_TILE;
        const int first_vector = first / LANES * LANES;
        int t = from;
        for (; t < first_vector && t < to; t += LANES) store_weights(weights + t, Float16{});
        Seen result = {-INFINITY, 0};
        if (first < end) {
            const int end_vector = static_cast<int>(round_up(end, LANES));
            if (a_.softcap > 0)
                for (int i = first_vector; i < end_vector; i += LANES)
                    store(scores + i, tanh16(load<Float16>(scores + i) / a_.softcap) * a_.softcap);
            for (int i = first_vector; i < first; i++) scores[i] = -INFINITY;
            for (int i = end; i < end_vector; i++) scores[i] = -INFINITY;
            Float16 peak = splat(-INFINITY);
            for (int i = first_vector; i < end_vector; i += LANES) peak = max16(load<Float16>(scores + i), peak);
            result.maximum = max_lanes(peak);
            Float16 added = {};
            for (; t < end_vector; t += LANES) {
                Float16 values = exp16_up_to_88(load<Float16>(scores + t) - splat(result.maximum));
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
        for (int r = 0; r < kv_heads_ * rows_; r++) {
            const int head = (kv_head_ + r / rows_) * group_ + r % group_;
            Shares shares = {1.0f, 1.0f};
            if (a_.sinks) shares = seen_[r].add({a_.sinks[head], 1.0f});
            const float share = shares.old / seen_[r].total;
            const int64_t place = (row_ + r % rows_ / group_) * a_.out_stride + int64_t{head} * dim_;
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
    const int unit_index_, kv_head_, kv_heads_, group_, dim_, groups_, rows_, row_, position_;
    const int32_t* table_;
    const AttentionItem* next_ = nullptr;
    bool is_part_ = false;
    float *sums_, *scores_, *results_;
    float *totals_ = nullptr, *shares_ = nullptr;  // of int4 alone: queries' sums by group, what minima add
    Seen* seen_;
    Row *weights_, *queries_;
    int64_t pages_[KEY_TILE / KV_PAGE], next_pages_[KEY_TILE / KV_PAGE];
};

// An item is a part of the tiles of a unit's rows of `head_run` KV heads; they are taken one by one where their rows are
// too many.
template <class Pages>
void attend(const Attention& a, int first, int end) {
    using Item = AttentionItem<Pages>;
    for (int item = first; item < end; item++) {
        const int whole = item / a.parts, unit = whole % a.unit_count, run = whole / a.unit_count * a.head_run;
        const int heads = Item::takes_heads_together(a, unit) ? a.head_run : 1;
        for (int head = run; head < run + a.head_run; head += heads) {
            Item work(a, head, heads, unit);
            if (a.parts > 1) {
                work.run_part(item % a.parts);
                continue;
            }
            const int next_unit = (unit + 1) % a.unit_count, next_head = next_unit ? head : head + heads;
            const bool is_last = item + 1 == end || next_head >= a.kv_heads || heads < a.head_run;
            const Item next(a, is_last ? head : next_head, heads, is_last ? unit : next_unit);
            work.run(is_last ? nullptr : &next);
        }
    }
}

template <class Pages>
void merge(const Attention& a, int first, int end) {
    for (int item = first; item < end; item++)
        AttentionItem<Pages>(a, item / a.unit_count, 1, item % a.unit_count).merge_parts();
}

}  // namespace
