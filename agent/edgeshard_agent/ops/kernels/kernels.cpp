// The kernels, compiled once for each instruction set (ES_ISA names it). Every result is computed by the same
// operations in the same order whatever the number of rows, so that a row alone equals the row in a batch bit for bit.
#include "activations.h"
#include "angles.h"
#include "attention.h"
#include "block_products.h"
#include "integer_products.h"
#include "kernels.h"
#include "kv_pages.h"
#include "layers.h"
#include "limits.h"
#include "outputs.h"
#include "products.h"
#include "recurrent.h"
#include "routing.h"
#include "sampling.h"
#include "unpacked_products.h"
#include "vectors.h"

namespace {

// Rows whose activations stay in the second-level cache while all panels pass.
constexpr int ROW_BLOCK = 96;
// A group of activations none of which is larger counts as zeros: the inverse of its scale could overflow. As in
// quantize.py.
constexpr float NEGLIGIBLE = 1e-30f;

// The passes over one panel: each tile of rows makes one for all its outputs, or one for each half of them.
struct Pass {
    int number, passes;
};

// What a pass fetches. Weights lie in one run, panel after panel, but a processor's own prefetching stops at the end of
// each page of 4 KiB.
#if defined(__AVX512F__)
// Two pages ahead, into the second-level cache
// (docs/decisions/kernels.md#choice-how-far-weights-are-prefetched).
constexpr FetchAhead WEIGHTS_AHEAD = {8192};

template <int VECTORS>
ES_INLINE FetchAhead weights_ahead(const char*, int64_t, Pass) {
    return WEIGHTS_AHEAD;
}
#else
// Few rows wait for memory: they fetch a little ahead of what they read, one line of every two. More rows read a panel
// several times, and fetch the next one meanwhile
// (docs/decisions/kernels.md#choice-how-far-weights-are-prefetched).
constexpr FetchOncePerStep NEAR = {512};

template <int VECTORS>
ES_INLINE auto weights_ahead(const char* panel, int64_t panel_bytes, Pass pass) {
    if constexpr (VECTORS == 2) {
        return NEAR;
    } else {
        const int64_t first = panel_bytes * pass.number / pass.passes;
        return FetchShare{panel + panel_bytes + first, (64 + pass.passes - 1) / pass.passes};
    }
}
#endif

// One policy for each scheme: the sums of ROWS rows (from `row` on) times VECTORS vectors of a panel, from `vector` on.

template <class Product>
struct FloatPolicy {
    static constexpr int MOST = MOST_ROWS;

    static constexpr int vectors(int rows) { return vectors_with(rows, 2); }

    static int64_t panel_bytes(const Linear& linear) {
        return int64_t{sizeof(typename Product::Panel)} * PANEL * linear.in_padded;
    }

    template <int ROWS, int VECTORS>
    static ES_INLINE Sums<ROWS, VECTORS> sums(const Linear& linear, const Activations& x, int row, const char* panel,
                                              int vector, Pass pass) {
        constexpr int STRIDE = PANEL * Product::STEP * int{sizeof(typename Product::Panel)};
        const char* rows = static_cast<const char*>(x.rows) + row * x.row_bytes;
        Sums<ROWS, VECTORS> sums = {};
        const char* outputs[VECTORS];
        for (int v = 0; v < VECTORS; v++) outputs[v] = panel + (vector + v) * 64;
#if defined(__AVX512F__)
        // One row gains nothing by it, and a site's one stream was slower.
        if constexpr (ROWS == 1) {
            Product::template add<STRIDE>(sums, rows, x.row_bytes, outputs, linear.in_padded, NothingAhead{});
            return sums;
        }
#endif
        const auto ahead = weights_ahead<VECTORS>(panel, panel_bytes(linear), pass);
        Product::template add<STRIDE>(sums, rows, x.row_bytes, outputs, linear.in_padded, ahead);
        return sums;
    }
};

template <int BITS>
struct IntegerPolicy {
    static constexpr int MOST = most_integer_rows<BITS>();

    static constexpr int vectors(int rows) { return integer_vectors(rows); }

    static int64_t panel_bytes(const Linear& linear) {
        const int64_t group_bytes = 2 * PANEL + linear.group / CHUNK_INPUTS<BITS> * CHUNK_BYTES;
        return linear.in_padded / linear.group * group_bytes;
    }

    template <int ROWS, int VECTORS>
    static ES_INLINE Sums<ROWS, VECTORS> sums(const Linear& linear, const Activations& x, int row, const char* panel,
                                              int vector, Pass pass) {
        const int groups = linear.in_padded / linear.group;
        const char* rows = static_cast<const char*>(x.rows) + row * x.row_bytes;
        const float* row_scales = x.scales + row;
        const int32_t* offsets = x.offsets + row;
        const auto ahead = weights_ahead<VECTORS>(panel, panel_bytes(linear), pass);
        const char* weights = panel;
        int64_t line = 0;
        Sums<ROWS, VECTORS> sums = {};
        for (int g = 0; g < groups; g++, row_scales += x.count, offsets += x.count) {
            Float16 scales[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const uint16_t* address = reinterpret_cast<const uint16_t*>(weights) + (vector + v) * LANES;
                scales[v] = linear.half_scales ? load_half(address) : load_bf16(address);
            }
            if constexpr (VECTORS == 1) ahead.fetch(weights, line);
            weights += 2 * PANEL;
            line++;
            GroupDots<BITS, ROWS, VECTORS> dots;
            dots.begin(offsets);
            dots.add(weights + vector * 64, rows, x.row_bytes, linear.group, line, ahead);
            const int chunks = linear.group / CHUNK_INPUTS<BITS>;
            weights += chunks * CHUNK_BYTES;
            rows += linear.group * dots.INPUT_BYTES;
            line += 2 * chunks;
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                // As bits: adding zero to an integer is nothing, and to a float an instruction.
                const Float16 row_scale = (Float16)splat(load<int32_t>(row_scales + r));
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sums.at[r][v] = fma16(to_float(dots.at[r][v]), scales[v] * row_scale, sums.at[r][v]);
            }
        }
        return sums;
    }
};

template <int32_t SCHEME>
struct BlockPolicy {
    using Form = BlockForm<SCHEME>;
    using Sizes = BlockSizes<Form>;
    static constexpr int MOST = most_integer_rows<4>();

    static constexpr int vectors(int rows) { return integer_vectors(rows); }

    static int64_t panel_bytes(const Linear& linear) {
        return int64_t{linear.in_padded / BLOCK_INPUTS} * Sizes::BLOCK_BYTES;
    }

    template <int ROWS, int VECTORS>
    static ES_INLINE Sums<ROWS, VECTORS> sums(const Linear& linear, const Activations& x, int row, const char* panel,
                                              int vector, Pass pass) {
        static constexpr int32_t NONE[MOST_ROWS] = {};
        const char* rows = static_cast<const char*>(x.rows) + row * x.row_bytes;
        const float* row_scales = x.scales + row;
        const int32_t* offsets = x.offsets + row;
        const auto ahead = weights_ahead<VECTORS>(panel, panel_bytes(linear), pass);
        int64_t line = 0;
        Sums<ROWS, VECTORS> sums = {};
        const char* weights = panel;
        for (int block = 0; block < linear.in_padded / BLOCK_INPUTS; block++) {
            Float16 factors[VECTORS], minimum_factors[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const uint16_t* address = reinterpret_cast<const uint16_t*>(weights) + (vector + v) * LANES;
                factors[v] = load_half(address);
                if constexpr (Form::HAS_MINIMA) minimum_factors[v] = load_half(address + PANEL);
            }
            if constexpr (VECTORS == 1) ahead.fetch(weights, line);
            weights += Sizes::FACTORS_BYTES;
            line += Sizes::FACTORS_BYTES / 64;
            for (int run = 0; run < Sizes::RUNS; run++, row_scales += x.count) {
                const char* scales = weights + vector * LANES;
                if constexpr (VECTORS == 1) ahead.fetch(weights, line);
                weights += Sizes::SCALES_BYTES;
                line += Sizes::SCALES_BYTES / 64;
#pragma GCC unroll 2
                for (int g = 0; g < Sizes::GROUPS; g++) {
                    Int16 dots[ROWS][VECTORS];
                    if constexpr (Form::HAS_LEVELS) {
                        LevelDots<ROWS, VECTORS> group;
                        group.add(offsets, weights + vector * 64, rows, x.row_bytes, line, ahead);
                        copy(group.at, dots);
                    } else if constexpr (Form::HIGH_BITS == 0) {
                        GroupDots<4, ROWS, VECTORS> group;
                        group.begin(NONE);
                        group.add(weights + vector * 64, rows, x.row_bytes, Form::GROUP, line, ahead);
                        copy(group.at, dots);
                    } else {
                        SplitDots<Form, ROWS, VECTORS> group;
                        for (int byte = 0; byte < Sizes::GROUP_BYTES; byte += CHUNK_BYTES)
                            ahead.fetch(weights + byte, line + byte / 64);
                        const char* low = weights + vector * 64;
                        group.add(low, low + Sizes::LOW_CHUNKS * CHUNK_BYTES, rows, x.row_bytes);
                        copy(group.at, dots);
                    }
                    weights += Sizes::GROUP_BYTES;
                    line += Sizes::GROUP_BYTES / 64;
                    rows += Form::GROUP;
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; v++) {
                        const Float16 scale =
                            to_float(load_bytes<!Form::HAS_MINIMA>(scales + g * PANEL + v * LANES)) * factors[v];
                        Float16 minimum = {};
                        if constexpr (Form::HAS_MINIMA)
                            minimum = to_float(load_bytes<false>(scales + PANEL + v * LANES)) * minimum_factors[v];
#pragma GCC unroll 12
                        for (int r = 0; r < ROWS; r++) {
                            const float row_scale = row_scales[r];
                            if constexpr (Form::HIGH_BITS == 2) dots[r][v] = dots[r][v] + splat(offsets[r]);
                            sums.at[r][v] = fma16(to_float(dots[r][v]), scale * splat(row_scale), sums.at[r][v]);
                            if constexpr (Form::HAS_MINIMA) {
                                const float taken = static_cast<float>(offsets[r]) * row_scale;
                                sums.at[r][v] = fma16(minimum, splat(taken), sums.at[r][v]);
                            }
                        }
                    }
                    offsets += x.count;
                }
            }
        }
        return sums;
    }

   private:
    template <int ROWS, int VECTORS>
    static ES_INLINE void copy(const Int16 (&from)[ROWS][VECTORS], Int16 (&to)[ROWS][VECTORS]) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) to[r][v] = from[r][v];
    }
};

template <class Policy, int ROWS>
__attribute__((noinline)) void run_tile(const Linear& linear, const Activations& x, const Output& out, int row,
                                        int panel, Pass pass) {
    constexpr int VECTORS = Policy::vectors(ROWS);
    const char* weights = static_cast<const char*>(linear.weights) + panel * Policy::panel_bytes(linear);
    for (int vector = 0; vector < 2; vector += VECTORS, pass.number++) {
        const auto sums = Policy::template sums<ROWS, VECTORS>(linear, x, row, weights, vector, pass);
        // Only the copy is unrolled. The code that follows would be, too, and take half of the compiler's time.
        float values[ROWS][VECTORS][LANES];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) store(values[r][v], sums.at[r][v]);
        const int column = panel * PANEL + vector * LANES;
        for (int r = 0; r < ROWS; r++) write_row(linear, out, row + r, column, values[r][0], VECTORS);
    }
}

template <class Policy, int ROWS>
ES_INLINE void run_tile_of(int count, const Linear& linear, const Activations& x, const Output& out, int row, int panel,
                           Pass pass) {
    if (count == ROWS) return run_tile<Policy, ROWS>(linear, x, out, row, panel, pass);
    if constexpr (ROWS > 1) run_tile_of<Policy, ROWS - 1>(count, linear, x, out, row, panel, pass);
}

// The rows from `first_row` up to `end_row` times some panels.
template <class Policy>
void run_rows(const Linear& linear, const Activations& x, const Output& out, int first_row, int end_row,
              int first_panel, int end_panel) {
    // Tiles of nearly equal size: 13 rows run as 7 and 6, not as 12 and a wasteful 1.
    const int count = (end_row - first_row + Policy::MOST - 1) / Policy::MOST;
    for (int panel = first_panel; panel < end_panel; panel++) {
        Pass pass = {0, 2 * count};
        int row = first_row;
        for (int tiles = count; tiles > 0; tiles--) {
            const int rows = (end_row - row + tiles - 1) / tiles;
            run_tile_of<Policy, Policy::MOST>(rows, linear, x, out, row, panel, pass);
            row += rows;
            pass.number += 2 / Policy::vectors(rows);
        }
    }
}

template <class Policy>
void run_linear(const Linear& linear, const Activations& x, const Output& out, int first_panel, int end_panel) {
    for (int row = 0; row < x.count; row += ROW_BLOCK) {
        const int end = row + ROW_BLOCK < x.count ? row + ROW_BLOCK : x.count;
        run_rows<Policy>(linear, x, out, row, end, first_panel, end_panel);
    }
}

thread_local Scratch widened_rows;

// The same with rows that are widened first, a block at a time, so that one instruction loads a number, or a pair, into
// all lanes. `From` is the type of a number, `To` the wide one.
template <class Policy, class From, class To>
[[maybe_unused]] void run_widened(const Linear& linear, const Activations& x, const Output& out, int first_panel,
                                  int end_panel) {
    // 64 bytes more than a multiple of a cache line: rows do not share the sets of a cache.
    const int64_t wide_bytes = round_up(int64_t{linear.in_padded} * int64_t{sizeof(To)}, 64) + 64;
    const int64_t out_bytes = out.stride * (out.element == ELEMENT_BF16 ? 2 : 4);
    for (int row = 0; row < x.count; row += ROW_BLOCK) {
        const int count = x.count - row < ROW_BLOCK ? x.count - row : ROW_BLOCK;
        char* wide = widened_rows.room(wide_bytes * count);
        for (int r = 0; r < count; r++) {
            const char* from = static_cast<const char*>(x.rows) + (row + r) * x.row_bytes;
            widen_row(reinterpret_cast<const From*>(from), linear.in_padded,
                      reinterpret_cast<To*>(wide + r * wide_bytes));
        }
        const Activations rows = {wide, wide_bytes, x.scales + row, x.offsets + row, x.count};
        const Output results = {static_cast<char*>(out.rows) + row * out_bytes, out.stride, out.element};
        run_rows<Policy>(linear, rows, results, 0, count, first_panel, end_panel);
    }
}

void run_bf16(const Linear& linear, const Activations& x, const Output& out, int first_panel, int end_panel) {
#if defined(__AVX512F__)
    run_linear<FloatPolicy<Bf16Product>>(linear, x, out, first_panel, end_panel);
#else
    run_widened<FloatPolicy<MixedProduct>, uint16_t, float>(linear, x, out, first_panel, end_panel);
#endif
}

void run_int8(const Linear& linear, const Activations& x, const Output& out, int first_panel, int end_panel) {
#if defined(ES_PAIRS_OF_BYTES)
    run_widened<IntegerPolicy<8>, int8_t, int16_t>(linear, x, out, first_panel, end_panel);
#else
    run_linear<IntegerPolicy<8>>(linear, x, out, first_panel, end_panel);
#endif
}

void linear(const Linear& linear, const Activations& x, const Output& out, int first_panel, int end_panel) {
    switch (linear.scheme) {
        case FP32: return run_linear<FloatPolicy<Fp32Product>>(linear, x, out, first_panel, end_panel);
        case BF16: return run_bf16(linear, x, out, first_panel, end_panel);
        case INT8: return run_int8(linear, x, out, first_panel, end_panel);
        case INT4: return run_linear<IntegerPolicy<4>>(linear, x, out, first_panel, end_panel);
        case INT2: return run_linear<IntegerPolicy<2>>(linear, x, out, first_panel, end_panel);
        case Q4_K: return run_linear<BlockPolicy<Q4_K>>(linear, x, out, first_panel, end_panel);
        case Q5_K: return run_linear<BlockPolicy<Q5_K>>(linear, x, out, first_panel, end_panel);
        case Q6_K: return run_linear<BlockPolicy<Q6_K>>(linear, x, out, first_panel, end_panel);
        case IQ4_XS: return run_linear<BlockPolicy<IQ4_XS>>(linear, x, out, first_panel, end_panel);
        case Q2_K: return run_unpacked<Q2_K>(linear, x, out, first_panel, end_panel);
        case Q3_K: return run_unpacked<Q3_K>(linear, x, out, first_panel, end_panel);
        case Q4_1: return run_unpacked<Q4_1>(linear, x, out, first_panel, end_panel);
        case Q5_0: return run_unpacked<Q5_0>(linear, x, out, first_panel, end_panel);
        case Q5_1: return run_unpacked<Q5_1>(linear, x, out, first_panel, end_panel);
        case IQ4_NL: return run_unpacked<IQ4_NL>(linear, x, out, first_panel, end_panel);
        case IQ3_S: return run_unpacked<IQ3_S>(linear, x, out, first_panel, end_panel);
        case IQ3_XXS: return run_unpacked<IQ3_XXS>(linear, x, out, first_panel, end_panel);
        case IQ2_S: return run_unpacked<IQ2_S>(linear, x, out, first_panel, end_panel);
        case IQ2_XS: return run_unpacked<IQ2_XS>(linear, x, out, first_panel, end_panel);
        case IQ2_XXS: return run_unpacked<IQ2_XXS>(linear, x, out, first_panel, end_panel);
        case IQ1_S: return run_unpacked<IQ1_S>(linear, x, out, first_panel, end_panel);
        case IQ1_M: return run_unpacked<IQ1_M>(linear, x, out, first_panel, end_panel);
        case TQ1_0: return run_unpacked<TQ1_0>(linear, x, out, first_panel, end_panel);
        case TQ2_0: return run_unpacked<TQ2_0>(linear, x, out, first_panel, end_panel);
        case MXFP4: return run_unpacked<MXFP4>(linear, x, out, first_panel, end_panel);
        case NVFP4: return run_unpacked<NVFP4>(linear, x, out, first_panel, end_panel);
        case Q1_0: return run_unpacked<Q1_0>(linear, x, out, first_panel, end_panel);
        case Q2_0: return run_unpacked<Q2_0>(linear, x, out, first_panel, end_panel);
        case INT4_ZEROS: return run_unpacked<INT4_ZEROS>(linear, x, out, first_panel, end_panel);
    }
}

// The zero point of a scheme: it was added to the weights before they were packed. 1 if minima multiply the negative sum of
// inputs, -1 if the kernel takes the sum itself.
int zero_point_of(int32_t scheme) {
    if (is_unpacked(scheme)) return -1;
    switch (scheme) {
        case INT2: return 3;
        case INT4: return 8;
        case Q4_K:
        case Q5_K: return 1;
        case Q6_K: return 32;
        default: return 128;
    }
}

template <class T>
void quantize_row(const Linear& linear, const T* x, int32_t rows, int8_t* row, float* scales, int32_t* offsets) {
    const int zero_point = zero_point_of(linear.scheme);
    // If each half of a group has an offset of its own, it is one vector.
    const int parts = sums_of_run(linear.scheme);
    for (int first = 0; first < linear.in_padded; first += linear.group, scales += rows, offsets += parts * rows) {
        Float16 values[8];
        Word16 largest = {};
        const int vectors = linear.group / LANES;
        for (int v = 0; v < vectors; v++) {
            int column = first + v * LANES;
            if (column + LANES <= linear.in_features) {
                values[v] = load_as_float(x + column);
            } else {
                values[v] = Float16{};
                for (int i = 0; column + i < linear.in_features; i++) values[v][i] = as_float(x[column + i]);
            }
            // Compared as integers, so that a NaN or an infinity is the largest of all and reaches the scale.
            Word16 bits = (Word16)values[v] & 0x7fffffffu;
            largest = max_words(bits, largest);
        }
        uint32_t peak = 0;
        for (int i = 0; i < LANES; i++) peak = largest[i] > peak ? largest[i] : peak;
        const float magnitude = bits_to_float(peak);
        const bool finite = peak < 0x7f800000u;
        if (!finite || magnitude < NEGLIGIBLE) {
            std::memset(row + first, 0, static_cast<size_t>(linear.group));
            *scales = finite ? 0.0f : bits_to_float(0x7fc00000u);
            for (int part = 0; part < parts; part++) offsets[part * rows] = 0;
            continue;
        }
        *scales = magnitude / 127.0f;
        const Float16 inverse = splat(127.0f / magnitude);
        Int16 totals[2] = {};
        for (int v = 0; v < vectors; v++) {
            // Adding and taking away 1.5 * 2^23 rounds to nearest, ties to even.
            Float16 shifted = values[v] * inverse + splat(12582912.0f);
            Int16 rounded = (Int16)shifted - 0x4b400000;
            totals[v & (parts - 1)] += rounded;
            for (int i = 0; i < LANES; i++) row[first + v * LANES + i] = static_cast<int8_t>(rounded[i]);
        }
        for (int part = 0; part < parts; part++) {
            int32_t sum = 0;
            for (int i = 0; i < LANES; i++) sum += totals[part][i];
            offsets[part * rows] = -zero_point * sum;
        }
    }
}

// From here on: the element type of a call chosen once.

void quantize(const Linear& linear, const void* x, int32_t element, int32_t rows, int8_t* row, float* scales,
              int32_t* offsets) {
    if (element == ELEMENT_BF16)
        quantize_row(linear, static_cast<const uint16_t*>(x), rows, row, scales, offsets);
    else
        quantize_row(linear, static_cast<const float*>(x), rows, row, scales, offsets);
}

template <class T>
void rms_norm_of(const void* x, const void* residual, const void* weight, void* normalised, void* sum, int32_t width,
                 float eps, int32_t form) {
    rms_norm_row(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
                 static_cast<T*>(normalised), static_cast<T*>(sum), width, eps, form);
}

void rms_norm(const void* x, const void* residual, const void* weight, void* normalised, void* sum, int32_t width,
              float eps, int32_t form, int32_t element) {
    auto run = element == ELEMENT_BF16 ? rms_norm_of<uint16_t> : rms_norm_of<float>;
    run(x, residual, weight, normalised, sum, width, eps, form);
}

template <class T>
void gated_head_norm_of(const void* x, const void* gate, const void* weight, void* out, int32_t width, float eps) {
    gated_head_norm_row(static_cast<const T*>(x), static_cast<const T*>(gate), static_cast<const T*>(weight),
                   static_cast<T*>(out), width, eps);
}

void gated_head_norm(const void* x, const void* gate, const void* weight, void* out, int32_t width, float eps,
                int32_t element) {
    (element == ELEMENT_BF16 ? gated_head_norm_of<uint16_t> : gated_head_norm_of<float>)(x, gate, weight, out, width, eps);
}

void sigmoid_gate(void* values, const void* gate, int32_t width, int32_t element) {
    if (element == ELEMENT_BF16)
        sigmoid_gate_row(static_cast<uint16_t*>(values), static_cast<const uint16_t*>(gate), width);
    else
        sigmoid_gate_row(static_cast<float*>(values), static_cast<const float*>(gate), width);
}

void swiglu(const void* gate_up, void* out, int32_t inner, int32_t element) {
    if (element == ELEMENT_BF16)
        swiglu_row(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), inner);
    else
        swiglu_row(static_cast<const float*>(gate_up), static_cast<float*>(out), inner);
}

void geglu(const void* gate_up, void* out, int32_t inner, int32_t element) {
    if (element == ELEMENT_BF16)
        geglu_row(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), inner);
    else
        geglu_row(static_cast<const float*>(gate_up), static_cast<float*>(out), inner);
}

void clamped_swiglu(const void* gate_up, void* out, int32_t inner, float alpha, float limit, int32_t element) {
    if (element == ELEMENT_BF16)
        clamped_swiglu_row(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), inner, alpha, limit);
    else
        clamped_swiglu_row(static_cast<const float*>(gate_up), static_cast<float*>(out), inner, alpha, limit);
}

template <class T, class Angle>
void rotary_of(void* head, const void* cos, const void* sin, int32_t rotary_dim) {
    rotary_head(static_cast<T*>(head), static_cast<const Angle*>(cos), static_cast<const Angle*>(sin), rotary_dim);
}

void rotary(void* head, const void* cos, const void* sin, int32_t rotary_dim, int32_t element, int32_t angle_element) {
    const bool angle_bf16 = angle_element == ELEMENT_BF16;
    if (element == ELEMENT_BF16)
        (angle_bf16 ? rotary_of<uint16_t, uint16_t> : rotary_of<uint16_t, float>)(head, cos, sin, rotary_dim);
    else
        (angle_bf16 ? rotary_of<float, uint16_t> : rotary_of<float, float>)(head, cos, sin, rotary_dim);
}

// The product of queries with keys, and of weights with values. Weights are rounded to what it takes.
template <class Task>
ES_INLINE void with_pages(const Attention& a, const Task& task) {
    const bool is_int4 = a.kv_element == ELEMENT_INT4;
    if (a.kv_element == ELEMENT_FP32) return task(PlainPages<Fp32Product>{});
#if defined(__AVX512BF16__)
    if (a.element == ELEMENT_BF16) {
        if (is_int4) return task(Int4Pages<uint16_t>{});
        return task(PlainPages<Bf16Product>{});
    }
#endif
    if (is_int4) return task(Int4Pages<float>{});
    task(PlainPages<MixedProduct>{});
}

void attention(const Attention& a, int32_t first, int32_t end) {
    with_pages(a, [&](auto pages) { attend<decltype(pages)>(a, first, end); });
}

void merge_attention(const Attention& a, int32_t first, int32_t end) {
    with_pages(a, [&](auto pages) { merge<decltype(pages)>(a, first, end); });
}

template <class T>
void sample_of(const SampledRows& rows, int32_t r) {
    sample_row(Row<T>(static_cast<const T*>(rows.logits) + r * rows.stride, rows.vocab), *rows.choices[r], rows.positions[r], rows.out[r]);
}

void sample(const SampledRows& rows, int32_t first, int32_t end) {
    for (int r = first; r < end; r++) (rows.element == ELEMENT_BF16 ? sample_of<uint16_t> : sample_of<float>)(rows, r);
}

void write_kv(const Attention& a, int32_t first_head, int32_t end_head) {
    const bool from_bf16 = a.element == ELEMENT_BF16;
    switch (a.kv_element) {
        case ELEMENT_FP32:
            return (from_bf16 ? write_heads<uint16_t, float> : write_heads<float, float>)(a, first_head, end_head);
        case ELEMENT_BF16:
            return (from_bf16 ? write_heads<uint16_t, uint16_t> : write_heads<float, uint16_t>)(a, first_head, end_head);
        default: return (from_bf16 ? write_int4_heads<uint16_t> : write_int4_heads<float>)(a, first_head, end_head);
    }
}

void convolution(const Convolution& c, int32_t first, int32_t end) {
    (c.element == ELEMENT_BF16 ? convolve<uint16_t> : convolve<float>)(c, first, end);
}

void delta_rule(const DeltaRule& d, int32_t first, int32_t end) {
    (d.element == ELEMENT_BF16 ? advance<uint16_t> : advance<float>)(d, first, end);
}

void delta_gates(const void* beta, const void* step, const float* a_log, const float* dt_bias, float* log_decay,
                 float* opened, int32_t heads, int32_t element) {
    if (element == ELEMENT_BF16)
        delta_gates_row(static_cast<const uint16_t*>(beta), static_cast<const uint16_t*>(step), a_log, dt_bias,
                        log_decay, opened, heads);
    else
        delta_gates_row(static_cast<const float*>(beta), static_cast<const float*>(step), a_log, dt_bias, log_decay,
                        opened, heads);
}

void selective_scan(const SelectiveScan& s, int32_t first, int32_t end) {
    (s.element == ELEMENT_BF16 ? scan<uint16_t> : scan<float>)(s, first, end);
}

void gated_norm(const GatedNorm& n, int32_t first, int32_t end) {
    for (int32_t row = first; row < end; row++)
        (n.element == ELEMENT_BF16 ? gated_norm_row<uint16_t> : gated_norm_row<float>)(n, row);
}

}  // namespace

extern const Kernels ES_ISA;
const Kernels ES_ISA = {linear,   quantize,       rms_norm,  gated_head_norm, sigmoid_gate,    swiglu,
                        geglu,    clamped_swiglu, rotary,    write_kv,        attention,       merge_attention,
                        sample,   convolution,    delta_rule, delta_gates,    selective_scan,  gated_norm,
                        angles,   activate,       route,     read_rate,       fma_rate};
