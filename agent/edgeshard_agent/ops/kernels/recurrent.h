// What blocks compute whose past is a state of fixed size, token by token: a short convolution, the gated delta rule and
// the selective scan.
#pragma once

#include <cmath>

#include "kernels.h"
#include "layers.h"
#include "vectors.h"

namespace {

constexpr float L2_EPS = 1e-6f;

// Channels `first` to `end` - 1 of one span. Sums are of the oldest input first.
template <class T>
void convolve_channels(const Convolution& c, int32_t span, int first, int end) {
    float taps[MOST_TAPS][CONVOLUTION_CHANNELS] = {};
    for (int i = first; i < end; i++)
        for (int tap = 0; tap < c.taps; tap++)
            taps[tap][i - first] = as_float(static_cast<const T*>(c.weight)[int64_t{i} * c.taps + tap]);
    const int before = c.taps - 1;
    const int64_t begin = c.first_rows[span], count = c.first_rows[span + 1] - begin;
    auto tail_in = [&](int32_t slot) { return static_cast<T*>(c.tails) + int64_t{slot} * before * c.channels; };
    // A copy: what is behind a row may go where these lie.
    T past[MOST_TAPS][CONVOLUTION_CHANNELS];
    for (int kept = 0; kept < before; kept++)
        for (int i = first; i < end; i++) past[kept][i - first] = tail_in(c.slots[span])[int64_t{kept} * c.channels + i];
    // From channel `i` on.
    auto input = [&](int64_t row, int i) {
        return row < 0 ? past[row + before] + (i - first) : static_cast<const T*>(c.x) + (begin + row) * c.x_stride + i;
    };
    for (int64_t row = 0; row < count; row++) {
        T* out = static_cast<T*>(c.out) + (begin + row) * c.channels;
        for (int i = first; i < end; i += LANES) {
            Float16 sum = {};
            for (int tap = 0; tap < c.taps; tap++)
                sum = fma16(load_some(input(row - before + tap, i), end - i), load<Float16>(taps[tap] + i - first), sum);
            if (c.bias) sum = sum + load_some(static_cast<const T*>(c.bias) + i, end - i);
            sum = rounded_to(out, sum);
            store_some(out + i, c.activated ? sum / (splat(1.0f) + exp16(-sum)) : sum, end - i);
        }
    }
    for (int64_t row = 0; row < count; row++) {
        const int32_t* own = c.row_slots ? c.row_slots + begin + row : c.slots + span;
        if (row + 1 < count && (!c.row_slots || own[1] == own[0])) continue;  // a later row's come there
        for (int kept = 0; kept < before; kept++) {
            const T* from = input(row + 1 - before + kept, first);
            for (int i = first; i < end; i++) tail_in(*own)[int64_t{kept} * c.channels + i] = from[i - first];
        }
    }
}

template <class T>
void convolve(const Convolution& c, int32_t first, int32_t end) {
    const int32_t pieces = convolution_pieces(c);
    for (int32_t item = first; item < end; item++) {
        const int begin = item % pieces * CONVOLUTION_CHANNELS;
        const int left = c.channels - begin;
        convolve_channels<T>(c, item / pieces, begin, begin + (left < CONVOLUTION_CHANNELS ? left : CONVOLUTION_CHANNELS));
    }
}

// What the projections of a row open and let decay: sigmoid(beta), and -exp(a_log) * softplus(step + dt_bias).
template <class T>
void delta_gates_row(const T* beta, const T* step, const float* a_log, const float* dt_bias, float* log_decay,
                     float* opened, int heads) {
    for (int h = 0; h < heads; h += LANES) {
        const Float16 raw = load_some(beta + h, heads - h);
        store_some(opened + h, rounded_to(beta, splat(1.0f) / (splat(1.0f) + exp16(-raw))), heads - h);
        const Float16 x = load_some(step + h, heads - h) + load_some(dt_bias + h, heads - h);
        store_some(log_decay + h, -exp16(load_some(a_log + h, heads - h)) * softplus16(x), heads - h);
    }
}

// row / sqrt(its squares' sum + eps) * scale.
template <class T>
ES_INLINE void l2_normalised(const T* row, float scale, int width, float* out) {
    Float16 squares = {};
    for (int i = 0; i < width; i += LANES) {
        const Float16 values = load_some(row + i, width - i);
        squares = fma16(values, values, squares);
    }
    const Float16 factor = splat(scale / std::sqrt(sum_lanes(squares) + L2_EPS));
    for (int i = 0; i < width; i += LANES) store_some(out + i, load_some(row + i, width - i) * factor, width - i);
}

// VECTORS vectors of columns from `column` on, of which there are `width`, through all tokens of a span. Columns do not
// depend on one another, and a piece of a state that fits into the first-level cache stays there.
template <class T, int VECTORS, bool BY_CHANNEL>
void advance_columns(const DeltaRule& d, int32_t span, int head, int column, int width) {
    alignas(64) float query[MOST_KEY_DIM], key[MOST_KEY_DIM], decays[MOST_KEY_DIM];
    const int64_t key_head = head / (d.value_heads / d.key_heads);
    auto state_in = [&](int32_t slot) {
        return d.states + (int64_t{slot} * d.value_heads + head) * d.key_dim * d.value_dim + column;
    };
    float* state = state_in(d.slots[span]);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d.key_dim));
    for (int64_t row = d.first_rows[span]; row < d.first_rows[span + 1]; row++) {
        l2_normalised(static_cast<const T*>(d.query) + row * d.query_stride + key_head * d.key_dim, scale, d.key_dim, query);
        l2_normalised(static_cast<const T*>(d.key) + row * d.key_stride + key_head * d.key_dim, 1.0f, d.key_dim, key);
        const T* value = static_cast<const T*>(d.value) + row * d.value_stride + int64_t{head} * d.value_dim + column;
        T* out = static_cast<T*>(d.out) + (row * d.value_heads + head) * d.value_dim + column;
        const float* log_decay = d.log_decay + (row * d.value_heads + head) * (BY_CHANNEL ? d.key_dim : 1);
        if (BY_CHANNEL)
            for (int i = 0; i < d.key_dim; i += LANES)
                store_some(decays + i, exp16(load_some(log_decay + i, d.key_dim - i)), d.key_dim - i);
        const Float16 of_all = exp16(splat(*log_decay));
        auto decay = [&](int i) { return BY_CHANNEL ? splat(decays[i]) : of_all; };
        const Float16 beta = splat(d.beta[row * d.value_heads + head]);
        float* behind = d.row_slots ? state_in(d.row_slots[row]) : state;
        Float16 kept[VECTORS] = {}, found[VECTORS] = {}, change[VECTORS];
        for (int i = 0; i < d.key_dim; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const float* at = state + int64_t{i} * d.value_dim + v * LANES;
                kept[v] = fma16(splat(key[i]), load_some(at, width - v * LANES) * decay(i), kept[v]);
            }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) change[v] = (load_some(value + v * LANES, width - v * LANES) - kept[v]) * beta;
        for (int i = 0; i < d.key_dim; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const int64_t at = int64_t{i} * d.value_dim + v * LANES;
                const Float16 decayed = load_some(state + at, width - v * LANES) * decay(i);
                const Float16 updated = fma16(splat(key[i]), change[v], decayed);
                store_some(behind + at, updated, width - v * LANES);
                found[v] = fma16(splat(query[i]), updated, found[v]);
            }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store_some(out + v * LANES, found[v], width - v * LANES);
        state = behind;
    }
}

template <class T, bool BY_CHANNEL>
void advance_heads(const DeltaRule& d, int32_t first, int32_t end) {
    const int32_t pieces = delta_pieces(d);
    for (int32_t item = first; item < end; item++) {
        const int32_t span = item / pieces / d.value_heads, head = item / pieces % d.value_heads;
        const int begin = item % pieces * DELTA_COLUMNS;
        if (d.value_dim - begin >= DELTA_COLUMNS) {
            advance_columns<T, DELTA_COLUMNS / LANES, BY_CHANNEL>(d, span, head, begin, DELTA_COLUMNS);
            continue;
        }
        for (int column = begin; column < d.value_dim; column += LANES) {
            const int left = d.value_dim - column;
            advance_columns<T, 1, BY_CHANNEL>(d, span, head, column, left < LANES ? left : LANES);
        }
    }
}

// As `advance_columns`, by the scan's rule.
template <class T, int VECTORS>
void scan_columns(const SelectiveScan& s, int32_t span, int head, int column, int width) {
    alignas(64) float b[MOST_STATE_DIM], c[MOST_STATE_DIM];
    const int64_t group_at = int64_t{head / (s.heads / s.groups)} * s.state_dim;
    auto state_in = [&](int32_t slot) {
        return s.states + (int64_t{slot} * s.heads + head) * s.state_dim * s.head_dim + column;
    };
    float* state = state_in(s.slots[span]);
    const float rate = exp16(splat(s.log_rate[head]))[0];
    for (int64_t row = s.first_rows[span]; row < s.first_rows[span + 1]; row++) {
        for (int i = 0; i < s.state_dim; i++) {
            b[i] = as_float(static_cast<const T*>(s.b)[row * s.b_stride + group_at + i]);
            c[i] = as_float(static_cast<const T*>(s.c)[row * s.c_stride + group_at + i]);
        }
        const float raw = as_float(static_cast<const T*>(s.step)[row * s.step_stride + head]) + s.step_bias[head];
        float step = softplus16(splat(raw))[0];
        step = step < s.least_step ? s.least_step : step > s.most_step ? s.most_step : step;
        const Float16 decay = exp16(splat(-step * rate));
        const T* x = static_cast<const T*>(s.x) + row * s.x_stride + int64_t{head} * s.head_dim + column;
        float* out = s.out + (row * s.heads + head) * s.head_dim + column;
        float* behind = s.row_slots ? state_in(s.row_slots[row]) : state;
        Float16 taken[VECTORS], found[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const Float16 values = load_some(x + v * LANES, width - v * LANES);
            taken[v] = values * step;
            found[v] = values * s.skip[head];
        }
        for (int i = 0; i < s.state_dim; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const int64_t at = int64_t{i} * s.head_dim + v * LANES;
                const Float16 updated = fma16(splat(b[i]), taken[v], load_some(state + at, width - v * LANES) * decay);
                store_some(behind + at, updated, width - v * LANES);
                found[v] = fma16(splat(c[i]), updated, found[v]);
            }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store_some(out + v * LANES, found[v], width - v * LANES);
        state = behind;
    }
}

template <class T>
void scan(const SelectiveScan& s, int32_t first, int32_t end) {
    const int32_t pieces = scan_pieces(s);
    for (int32_t item = first; item < end; item++) {
        const int32_t span = item / pieces / s.heads, head = item / pieces % s.heads;
        const int begin = item % pieces * SCAN_COLUMNS;
        if (s.head_dim - begin >= SCAN_COLUMNS) {
            scan_columns<T, SCAN_COLUMNS / LANES>(s, span, head, begin, SCAN_COLUMNS);
            continue;
        }
        for (int column = begin; column < s.head_dim; column += LANES) {
            const int left = s.head_dim - column;
            scan_columns<T, 1>(s, span, head, column, left < LANES ? left : LANES);
        }
    }
}

template <class T>
void advance(const DeltaRule& d, int32_t first, int32_t end) {
    (d.by_channel ? advance_heads<T, true> : advance_heads<T, false>)(d, first, end);
}

}  // namespace
