// A step of few tokens through a run of Llama blocks in one call: no Python, and no wait for Python's lock, between
// operators.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "library.h"

namespace {

// What a block is; blocks.py fills it in. Norm weights are of `element`; q_norm and k_norm may be null.
struct Block {
    const Linear *qkv, *output, *gate_up, *down;
    const void *input_norm, *post_norm, *q_norm, *k_norm;
    int32_t hidden, heads, kv_heads, head_dim, inner, window, element;
    float eps, scale;
};

// What the blocks of one step share: the rows of some spans, as `Attention` has them.
struct Step {
    const void *cos, *sin;
    const int32_t *block_tables, *lengths, *first_rows;
    int64_t table_stride;
    int32_t rows, spans, rotary_dim, block_tokens, table_blocks, arena_blocks, kv_element, threads;
};

// Between the operators of a block; kept, for each calling thread.
struct Buffers {
    std::vector<char> normed, qkv, attended, gate_up, inner;
};
thread_local Buffers buffers;

char* room(std::vector<char>& buffer, int64_t bytes) {
    if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(static_cast<size_t>(bytes));
    return buffer.data();
}

int32_t run(const Block& b, const Step& s, void* keys, void* values, void* addend, void* residual,
            bool first) {
    const int64_t size = b.element == ELEMENT_BF16 ? 2 : 4, rows = s.rows;
    const int64_t query = static_cast<int64_t>(b.heads) * b.head_dim, kv = static_cast<int64_t>(b.kv_heads) * b.head_dim;
    const int64_t packed = query + 2 * kv;
    char* normed = room(buffers.normed, rows * b.hidden * size);
    char* qkv = room(buffers.qkv, rows * packed * size);
    char* attended = room(buffers.attended, rows * query * size);
    char* gate_up = room(buffers.gate_up, rows * 2 * b.inner * size);
    char* inner = room(buffers.inner, rows * b.inner * size);
    auto linear = [&](const Linear* weight, const void* x, int64_t width, void* out, int64_t outputs) {
        edgeshard_linear(weight, x, width, s.rows, out, outputs, b.element, s.threads);
    };

    edgeshard_rms_norm(addend, first ? nullptr : residual, b.input_norm, normed, residual, s.rows, b.hidden, b.eps,
                       NORM_PLAIN, b.element);
    linear(b.qkv, normed, b.hidden, qkv, packed);
    for (int64_t r = 0; b.q_norm && r < rows; r++) {
        char* row = qkv + r * packed * size;
        edgeshard_rms_norm(row, nullptr, b.q_norm, row, row, b.heads, b.head_dim, b.eps, NORM_PLAIN, b.element);
        row += query * size;
        edgeshard_rms_norm(row, nullptr, b.k_norm, row, row, b.kv_heads, b.head_dim, b.eps, NORM_PLAIN, b.element);
    }
    edgeshard_rotary(qkv, packed, s.rows, b.heads + b.kv_heads, b.head_dim, b.element, s.cos, s.sin, s.rotary_dim,
                     b.element);
    Attention attention{};
    attention.query = qkv;
    attention.keys = keys;
    attention.values = values;
    attention.new_keys = qkv + query * size;
    attention.new_values = qkv + (query + kv) * size;
    attention.block_tables = s.block_tables;
    attention.lengths = s.lengths;
    attention.first_rows = s.first_rows;
    attention.out = attended;
    attention.query_stride = packed;
    attention.out_stride = query;
    attention.new_stride = packed;
    attention.table_stride = s.table_stride;
    attention.spans = s.spans;
    attention.heads = b.heads;
    attention.kv_heads = b.kv_heads;
    attention.head_dim = b.head_dim;
    attention.block_tokens = s.block_tokens;
    attention.table_blocks = s.table_blocks;
    attention.arena_blocks = s.arena_blocks;
    attention.window = b.window;
    attention.element = b.element;
    attention.kv_element = s.kv_element;
    attention.scale = b.scale;
    const int32_t refused = edgeshard_attention(&attention, s.threads);
    if (refused >= 0) return refused;
    linear(b.output, attended, query, addend, b.hidden);
    edgeshard_rms_norm(addend, residual, b.post_norm, normed, residual, s.rows, b.hidden, b.eps, NORM_PLAIN,
                       b.element);
    linear(b.gate_up, normed, b.hidden, gate_up, int64_t{2} * b.inner);
    edgeshard_swiglu(gate_up, inner, s.rows, b.inner, b.element);
    linear(b.down, inner, b.inner, addend, b.hidden);
    return -1;
}

}  // namespace

// Runs steps through the blocks in order, all of them through one block before the next: so its weights come from memory
// once. `addends` and `residuals` are of each step, [rows][hidden]: where it has not `begun` the addend holds the input
// and the residual nothing; behind any block the output is their sum. Returns -1, or for a step that is refused, as by
// edgeshard_attention, its index << 32 | the span.
extern "C" int64_t edgeshard_blocks(const Block* const* blocks, void* const* keys, void* const* values, int32_t count,
                                    const Step* const* steps, void* const* addends, void* const* residuals,
                                    const uint8_t* begun, int32_t step_count) {
    for (int32_t i = 0; i < count; i++) {
        for (int32_t j = 0; j < step_count; j++) {
            const bool first = i == 0 && !begun[j];
            const int32_t refused = run(*blocks[i], *steps[j], keys[i], values[i], addends[j], residuals[j], first);
            if (refused >= 0) return static_cast<int64_t>(j) << 32 | refused;
        }
    }
    return -1;
}
