// The C interface of the library: native.py calls it, and blocks.cpp within. Strides are in elements; the caller has
// checked shapes and types.
#pragma once

#include "kernels.h"

extern "C" {
// What the library was made of: `digest` of sources.py.
const char* edgeshard_sources();

// By what it was made: a compiler, its version and the options that decide about bits.
const char* edgeshard_kernel_set();

// The name of the i-th kernels this CPU can run, the best first, or null.
const char* edgeshard_kernels(int32_t index);

// The name of the i-th kernels this CPU could run if the library had them, the best first, or null.
const char* edgeshard_cpu_kernels(int32_t index);

// The names of the kernels that were to be compiled, separated by spaces; a compiler too old for some has left them out.
const char* edgeshard_requested_kernels();

// For tests: run the i-th kernels from now on.
void edgeshard_use_kernels(int32_t index);

// Keeps so many cores from halting for so long from now on.
void edgeshard_idle_spin(int32_t cores, int64_t nanoseconds);

void edgeshard_linear(const Linear* linear, const void* x, int64_t x_stride, int32_t rows, void* out,
                      int64_t out_stride, int32_t element, int32_t thread_count);

void edgeshard_rms_norm(const void* x, const void* residual, const void* weight, void* normalised, void* sum,
                        int32_t rows, int32_t width, float eps, int32_t form, int32_t element);

// `out` and x are [rows][heads][width], a row of gates begins every `gate_stride`; `values` are [rows][width].
void edgeshard_gated_head_norm(const void* x, const void* gate, int64_t gate_stride, const void* weight, void* out,
                          int32_t rows, int32_t heads, int32_t width, float eps, int32_t element);
void edgeshard_sigmoid_gate(void* values, const void* gate, int64_t gate_stride, int32_t rows, int32_t width,
                            int32_t element);

// From gate | up, [rows][2 * inner], to [rows][inner]; the last takes numbers of gate and up in turn.
void edgeshard_swiglu(const void* gate_up, void* out, int32_t rows, int32_t inner, int32_t element);
void edgeshard_geglu(const void* gate_up, void* out, int32_t rows, int32_t inner, int32_t element);
void edgeshard_clamped_swiglu(const void* gate_up, void* out, int32_t rows, int32_t inner, float alpha, float limit,
                              int32_t element);

// `x` has `stride` between rows; `out` is [rows][width].
void edgeshard_activate(const void* x, int64_t stride, void* out, int32_t rows, int32_t width, int32_t activation,
                        float cap, int32_t element);

void edgeshard_route(const Routing* routing, int32_t thread_count);

void edgeshard_angles(const Angles* angles);
void edgeshard_rotary(void* x, int64_t row_stride, int32_t rows, int32_t heads, int32_t head_dim, int32_t element,
                      const void* cos, const void* sin, int32_t rotary_dim, int32_t angle_element);

// Writes the new keys and values, then attends. Returns the span whose length or blocks lie outside its table or the
// arena, before anything is written, or -1.
int32_t edgeshard_attention(const Attention* attention, int32_t thread_count);

// These return the first span whose slot there is not, before anything is written, or -1.
int32_t edgeshard_convolution(const Convolution* convolution, int32_t thread_count);
int32_t edgeshard_delta_rule(const DeltaRule* rule, int32_t thread_count);
int32_t edgeshard_selective_scan(const SelectiveScan* scan, int32_t thread_count);

void edgeshard_gated_norm(const GatedNorm* norm, int32_t thread_count);

// The last two of the rule from raw ones: `beta` and `step` have `stride` between rows, the outputs are [rows][heads].
void edgeshard_delta_gates(const void* beta, const void* step, int64_t stride, const float* a_log, const float* dt_bias,
                           float* log_decay, float* opened, int32_t rows, int32_t heads, int32_t element);

// CRC32C of so many bytes.
uint32_t edgeshard_crc32c(const void* data, int64_t size);

// The limits of this machine for one thread, by the kernels in use: GB/s of a stream over `bytes` bytes (0 without the
// memory for them), and GFLOP/s of float32 multiply-adds.
double edgeshard_read_rate(int64_t bytes);
double edgeshard_fma_rate();

// A token for each row.
void edgeshard_sample(const SampledRows* sampled, int32_t rows, int32_t thread_count);
}
