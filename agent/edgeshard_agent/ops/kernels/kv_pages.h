// New keys and values on their way into the paged KV memory (`KvPage` in kernels.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "kv_int4.h"
#include "vectors.h"

namespace {

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

// Calls write(place of the page and head, token within the page, where the new key and value begin) for each new token.
template <class Write>
ES_INLINE void for_new_tokens(const Attention& a, int first_head, int end_head, const Write& write) {
    for (int head = first_head; head < end_head; head++)
        for (int s = 0; s < a.spans; s++) {
            const int32_t* table = a.block_tables + s * a.table_stride;
            for (int row = a.first_rows[s]; row < a.first_rows[s + 1]; row++) {
                const int position = a.lengths[s] - (a.first_rows[s + 1] - row);
                const int64_t slot = int64_t{table[position / a.block_tokens]} * a.block_tokens + position % a.block_tokens;
                write(slot / KV_PAGE * a.kv_heads + head, static_cast<int>(slot % KV_PAGE),
                      row * a.new_stride + int64_t{head} * a.head_dim);
            }
        }
}

template <class From, class To>
void write_heads(const Attention& a, int first_head, int end_head) {
    const int64_t page = int64_t{KV_PAGE} * a.head_dim;
    for_new_tokens(a, first_head, end_head, [&](int64_t place, int at, int64_t from) {
        write_token(static_cast<To*>(a.keys) + place * page, static_cast<To*>(a.values) + place * page, at,
                    static_cast<const From*>(a.new_keys) + from, static_cast<const From*>(a.new_values) + from,
                    a.head_dim);
    });
}

template <class From>
void write_int4_heads(const Attention& a, int first_head, int end_head) {
    const Int4Layout layout(a.head_dim);
    for_new_tokens(a, first_head, end_head, [&](int64_t place, int at, int64_t from) {
        const int64_t offset = place * layout.page_bytes();
        write_int4_token(static_cast<char*>(a.keys) + offset, static_cast<char*>(a.values) + offset, at,
                         static_cast<const From*>(a.new_keys) + from, static_cast<const From*>(a.new_values) + from,
                         layout);
    });
}

}  // namespace
