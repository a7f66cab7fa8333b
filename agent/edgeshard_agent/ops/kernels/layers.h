// What stands between the linear layers, row by row. Numbers are rounded to the element type where torch rounds them.
#pragma once

#include <cmath>

#include "kernels.h"
#include "vectors.h"

namespace {

template <class T>
ES_INLINE Float16 load_some(const T* address, int count) {
    if (count >= LANES) return load_as_float(address);
    Float16 values = {};
    for (int i = 0; i < count; i++) values[i] = as_float(address[i]);
    return values;
}

template <class T>
ES_INLINE void store_some(T* address, Float16 values, int count) {
    if (count >= LANES) return store_float(address, values);
    for (int i = 0; i < count; i++) put_float(address + i, values[i]);
}

ES_INLINE Float16 rounded_to(const float*, Float16 values) { return values; }
ES_INLINE Float16 rounded_to(const uint16_t*, Float16 values) {
    uint16_t halves[LANES];
    store_bf16(halves, values);
    return load_bf16(halves);
}

template <class T>
void rms_norm_row(const T* x, const T* residual, const T* weight, T* normalised, T* sum, int width, float eps) {
    Float16 squares = {};
    for (int i = 0; i < width; i += LANES) {
        Float16 values = load_some(x + i, width - i);
        if (residual) values = rounded_to(x, values + load_some(residual + i, width - i));
        store_some(sum + i, values, width - i);
        squares = fma16(values, values, squares);
    }
    const Float16 scale = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + eps));
    for (int i = 0; i < width; i += LANES) {
        Float16 values = rounded_to(x, load_some(sum + i, width - i) * scale);
        store_some(normalised + i, values * load_some(weight + i, width - i), width - i);
    }
}

template <class T>
void swiglu_row(const T* gate_up, T* out, int inner) {
    for (int i = 0; i < inner; i += LANES) {
        Float16 gate = load_some(gate_up + i, inner - i);
        Float16 up = load_some(gate_up + inner + i, inner - i);
        Float16 activated = rounded_to(gate_up, gate / (splat(1.0f) + exp16(-gate)));
        store_some(out + i, activated * up, inner - i);
    }
}

// The angles are rounded to the element type first, as transformers does.
template <class T, class Angle>
void rotary_head(T* head, const Angle* cos, const Angle* sin, int rotary_dim) {
    const int half = rotary_dim / 2;
    auto angle = [&](const Angle* values, int i) { return rounded_to(head, load_some(values + i, half - i % half)); };
    for (int i = 0; i < half; i += LANES) {
        const int left = half - i;
        Float16 first = load_some(head + i, left), second = load_some(head + half + i, left);
        Float16 turned_first = rounded_to(head, -second * angle(sin, i));
        Float16 turned_second = rounded_to(head, first * angle(sin, half + i));
        store_some(head + i, rounded_to(head, first * angle(cos, i)) + turned_first, left);
        store_some(head + half + i, rounded_to(head, second * angle(cos, half + i)) + turned_second, left);
    }
}

// Tokens whose scores are made before their values are read.
constexpr int TOKEN_TILE = 64;
constexpr int MOST_HEAD_DIM = 256;

// HEADS query heads that share one KV head, for one request: softmax over tiles of tokens with a running maximum.
template <class Q, class KV, int HEADS>
void attend(const Attention& a, int row, int kv_head, int first_head) {
    const int dim = a.head_dim, vectors = dim / LANES;
    const Q* query = static_cast<const Q*>(a.query) + row * a.query_stride + first_head * dim;
    const KV* keys = static_cast<const KV*>(a.keys) + kv_head * dim;
    const KV* values = static_cast<const KV*>(a.values) + kv_head * dim;
    const int32_t* table = a.block_tables + row * a.table_stride;
    const int64_t slot_stride = static_cast<int64_t>(a.kv_heads) * dim;
    const int length = a.lengths[row];
    const int start = a.window > 0 && length > a.window ? length - a.window : 0;

    Float16 q[HEADS][MOST_HEAD_DIM / LANES], sums[HEADS][MOST_HEAD_DIM / LANES];
    float maximum[HEADS], total[HEADS];
    for (int h = 0; h < HEADS; h++) {
        for (int v = 0; v < vectors; v++) {
            q[h][v] = load_as_float(query + h * dim + v * LANES) * splat(a.scale);
            sums[h][v] = Float16{};
        }
        maximum[h] = -INFINITY;
        total[h] = 0;
    }
    for (int tile = start; tile < length; tile += TOKEN_TILE) {
        const int count = length - tile < TOKEN_TILE ? length - tile : TOKEN_TILE;
        int64_t offsets[TOKEN_TILE];
        alignas(64) float scores[HEADS][TOKEN_TILE];
        int block = tile / a.block_tokens, within = tile % a.block_tokens;
        for (int t = 0; t < count; t++) {
            offsets[t] = (static_cast<int64_t>(table[block]) * a.block_tokens + within) * slot_stride;
            if (++within == a.block_tokens) within = 0, block++;
        }
        for (int t = 0; t < count; t++) {
            const KV* key = keys + offsets[t];
            Float16 products[HEADS] = {};
            for (int v = 0; v < vectors; v++) {
                Float16 k = load_as_float(key + v * LANES);
                for (int h = 0; h < HEADS; h++) products[h] = fma16(q[h][v], k, products[h]);
            }
            for (int h = 0; h < HEADS; h++) scores[h][t] = sum_lanes(products[h]);
        }
        const int whole = (count + LANES - 1) / LANES * LANES;
        for (int h = 0; h < HEADS; h++) {
            if (a.softcap > 0)
                for (int t = 0; t < count; t++) scores[h][t] = std::tanh(scores[h][t] / a.softcap) * a.softcap;
            for (int t = count; t < whole; t++) scores[h][t] = -INFINITY;
            Float16 peak = splat(maximum[h]);
            for (int t = 0; t < whole; t += LANES) peak = max16(load<Float16>(scores[h] + t), peak);
            const float new_maximum = max_lanes(peak);
            const float shrink = exp16(splat(maximum[h] - new_maximum))[0];
            maximum[h] = new_maximum;
            Float16 added = {};
            for (int t = 0; t < whole; t += LANES) {
                Float16 weights = exp16(load<Float16>(scores[h] + t) - splat(new_maximum));
                if (t + LANES > count)
                    for (int i = count - t; i < LANES; i++) weights[i] = 0;
                store(scores[h] + t, weights);
                added += weights;
            }
            total[h] = total[h] * shrink + sum_lanes(added);
            for (int v = 0; v < vectors; v++) sums[h][v] *= splat(shrink);
        }
        for (int v = 0; v < vectors; v++) {
            Float16 parts[HEADS];
            for (int h = 0; h < HEADS; h++) parts[h] = sums[h][v];
            for (int t = 0; t < count; t++) {
                Float16 value = load_as_float(values + offsets[t] + v * LANES);
                for (int h = 0; h < HEADS; h++) parts[h] = fma16(splat(scores[h][t]), value, parts[h]);
            }
            for (int h = 0; h < HEADS; h++) sums[h][v] = parts[h];
        }
    }
    Q* out = static_cast<Q*>(a.out) + row * a.out_stride + first_head * dim;
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < vectors; v++) store_float(out + h * dim + v * LANES, sums[h][v] * splat(1.0f / total[h]));
}

template <class Q, class KV>
void attend_all(const Attention& a, int first, int end) {
    const int group = a.heads / a.kv_heads;
    for (int item = first; item < end; item++) {
        const int row = item / a.kv_heads, kv_head = item % a.kv_heads;
        int head = kv_head * group, left = group;
        for (; left >= 4; left -= 4, head += 4) attend<Q, KV, 4>(a, row, kv_head, head);
        for (; left >= 2; left -= 2, head += 2) attend<Q, KV, 2>(a, row, kv_head, head);
        for (; left >= 1; left -= 1, head += 1) attend<Q, KV, 1>(a, row, kv_head, head);
    }
}

}  // namespace
