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

// `form` is one of NORM_...
template <class T>
void rms_norm_row(const T* x, const T* residual, const T* weight, T* normalised, T* sum, int width, float eps,
                  int form) {
    Float16 squares = {};
    for (int i = 0; i < width; i += LANES) {
        Float16 values = load_some(x + i, width - i);
        if (residual) values = rounded_to(x, values + load_some(residual + i, width - i));
        store_some(sum + i, values, width - i);
        squares = fma16(values, values, squares);
    }
    const Float16 scale = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + eps));
    const bool rounded_last = form != NORM_PLAIN;
    const Float16 offset = splat(form == NORM_UNIT_OFFSET ? 1.0f : 0.0f);
    for (int i = 0; i < width; i += LANES) {
        const Float16 values = load_some(sum + i, width - i) * scale, factors = load_some(weight + i, width - i);
        store_some(normalised + i, rounded_last ? values * (factors + offset) : rounded_to(x, values) * factors,
                   width - i);
    }
}

// The norm of a row times silu(gate), which is not rounded.
template <class T>
void gated_head_norm_row(const T* x, const T* gate, const T* weight, T* out, int width, float eps) {
    rms_norm_row(x, static_cast<const T*>(nullptr), weight, out, out, width, eps, NORM_PLAIN);
    for (int i = 0; i < width; i += LANES) {
        const Float16 opened = load_some(gate + i, width - i);
        const Float16 factor = opened / (splat(1.0f) + exp16(-opened));
        store_some(out + i, load_some(out + i, width - i) * factor, width - i);
    }
}

// values * sigmoid(gate), in place.
template <class T>
void sigmoid_gate_row(T* values, const T* gate, int width) {
    for (int i = 0; i < width; i += LANES) {
        const Float16 opened = rounded_to(gate, splat(1.0f) / (splat(1.0f) + exp16(-load_some(gate + i, width - i))));
        store_some(values + i, load_some(values + i, width - i) * opened, width - i);
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

// gelu(gate) * up in its form with tanh: (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)).
template <class T>
void geglu_row(const T* gate_up, T* out, int inner) {
    for (int i = 0; i < inner; i += LANES) {
        const Float16 gate = load_some(gate_up + i, inner - i), up = load_some(gate_up + inner + i, inner - i);
        const Float16 slope = fma16(gate * gate, splat(0.0713548162726f), splat(1.5957691216057f));
        store_some(out + i, rounded_to(gate_up, gate / (splat(1.0f) + exp16(-gate * slope))) * up, inner - i);
    }
}

// gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up within it; the two come in turn.
template <class T>
void clamped_swiglu_row(const T* gate_up, T* out, int inner, float alpha, float limit) {
    auto rounded = [&](Float16 values) { return rounded_to(gate_up, values); };
    for (int i = 0; i < inner; i += LANES) {
        Float16 gate = {}, up = {};
        for (int j = 0; j < LANES && i + j < inner; j++) {
            gate[j] = as_float(gate_up[2 * (i + j)]);
            up[j] = as_float(gate_up[2 * (i + j) + 1]);
        }
        gate = min16(splat(limit), gate);
        up = max16(splat(-limit), min16(splat(limit), up));
        const Float16 opened = rounded(splat(1.0f) / (splat(1.0f) + exp16(-rounded(gate * splat(alpha)))));
        store_some(out + i, rounded(up + splat(1.0f)) * rounded(gate * opened), inner - i);
    }
}

// In float32 up to the end, whatever the element type.
template <class T>
void gated_norm_row(const GatedNorm& n, int64_t row) {
    const T* gates = static_cast<const T*>(n.gate) + row * n.gate_stride;
    const T* weight = static_cast<const T*>(n.weight);
    T* out = static_cast<T*>(n.out) + row * n.width;
    float* x = n.x + row * n.width;
    auto opened = [&](Float16 values, int i, int left) {
        const Float16 gate = load_some(gates + i, left);
        return values * (gate / (splat(1.0f) + exp16(-gate)));
    };
    const int size = n.width / n.groups;
    for (int begin = 0; begin < n.width; begin += size) {
        const int end = begin + size;
        Float16 squares = {};
        for (int i = begin; i < end; i += LANES) {
            Float16 values = load_some(x + i, end - i);
            if (n.gate_first) values = opened(values, i, end - i);
            store_some(x + i, values, end - i);
            squares = fma16(values, values, squares);
        }
        const float scale = weight ? 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + n.eps) : 1.0f;
        for (int i = begin; i < end; i += LANES) {
            Float16 values = load_some(x + i, end - i);
            if (weight) values = values * scale * load_some(weight + i, end - i);
            if (!n.gate_first) values = opened(values, i, end - i);
            store_some(out + i, values, end - i);
        }
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

}  // namespace
