// What the library of dispatch and threads (library.cpp) and the kernels of one instruction set (kernels.cpp) share.
#pragma once

#include <cstdint>

enum Scheme : int32_t {
    FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, INT2 = 4,
    Q4_K = 5, Q5_K = 6, Q6_K = 7, IQ4_XS = 8,
    Q2_K = 9, Q3_K = 10, Q4_1 = 11, Q5_0 = 12, Q5_1 = 13, IQ4_NL = 14,
    IQ3_S = 15, IQ3_XXS = 16, IQ2_S = 17, IQ2_XS = 18, IQ2_XXS = 19, IQ1_S = 20, IQ1_M = 21,
    TQ1_0 = 22, TQ2_0 = 23, MXFP4 = 24, NVFP4 = 25, Q1_0 = 26, Q2_0 = 27, INT4_ZEROS = 28
};
// Those of unpacked_products.h.
constexpr bool is_unpacked(int32_t scheme) { return scheme >= Q2_K; }
// The sums of inputs that a row has for each 32 of them: one, or one for each 16.
constexpr int sums_of_run(int32_t scheme) {
    switch (scheme) {
        case Q6_K:
        case Q2_K:
        case Q3_K:
        case IQ2_S:
        case IQ2_XS:
        case IQ1_M:
        case NVFP4: return 2;
        default: return 1;
    }
}
// The last one is of keys and values alone.
enum Element : int32_t { ELEMENT_FP32 = 0, ELEMENT_BF16 = 1, ELEMENT_INT4 = 2 };

// A packed weight; packing.py lays it out. Outputs come in panels of 32 (two vectors), and a panel is one stretch of
// memory in the order the kernels read it, so that a core streams it at the speed of memory:
//   fp32  [panel][k][32]
//   bf16  [panel][k / 2][32][2]
//   int8  [panel][group]: scales [32] bfloat16, then [k / 4][32][4] of value + 128
//   int4  [panel][group]: scales [32] bfloat16, then [k / 8][32][4] of value + 8: inputs 0-3 in the low nibbles, 4-7 high
//   int2  [panel][group]: scales [32] bfloat16, then [k / 16][32][4] of (value + 3) / 2: inputs 0-3 in the lowest two bits,
//         4-7 in the next; values are -3, -1, 1 and 3
// The others are llama.cpp's formats, in blocks of 256 inputs. Scales of groups are integers that multiply a block's float16
// factor, and minima, which are subtracted, multiply another. The low four bits of weights lie as in int4.
//   q4_k  [panel][block]: factors [32], factors of minima [32]; then for each of 8 groups of 32 inputs: scales uint8 [32],
//         minima uint8 [32], and [k / 8][32][4]
//   q5_k  the same, and behind the low bits of each group its fifth bits, [32][4]: bit i of byte j is of input 4 i + j
//   q6_k  [panel][block]: factors [32]; then for each of 8 pairs of groups of 16 inputs: scales int8 [2][32], and for each of
//         the two low bits [k / 8][32][4], and bits 4 and 5 of value + 32, [32][4]: bits 2 i and 2 i + 1 of byte j are of
//         input 4 i + j
//   iq4_xs  [panel][block]: factors [32]; then for each of 8 groups of 32 inputs: scales int8 [32] and [k / 8][32][4] of places
//         in LEVELS
// The rest lie as in the store, 32 outputs side by side: [panel][block], and of each unit of the stored block [32][unit].
// A unit has 4 bytes. A float16 factor is a unit of 2, the scale of mxfp4 and the zero of int4_zeros are units of 1.
// Inputs are padded with zeros to whole pairs or groups. Weights that are stored as integers keep their float16 scales.
struct Linear {
    const void* weights;
    const float* bias;  // [panels * 32], or null
    int32_t scheme, group;
    int32_t in_features, in_padded;
    int32_t out_features, panels;
    int32_t half_scales;  // the integers' scales are float16
    const Linear* next;   // the matrix of the outputs behind these, for the same rows; or null
    const void* table;    // of a format that has one: vectors by their place, or scales by their byte
};

// The rows of one call, as the kernels read them. For fp32 and bf16 `rows` are the (padded) activations; for the integer
// schemes they are int8 with a scale and the zero point's share of each group's sum.
struct Activations {
    const void* rows;
    int64_t row_bytes;
    const float* scales;    // [groups][rows]: what a tile needs of a group lies together
    const int32_t* offsets;  // [groups][rows]; of q6_k [inputs / 16][rows]
    int32_t count;
};

struct Output {
    void* rows;
    int64_t stride;  // elements
    int32_t element;
};

// Keys and values lie in pages of so many tokens, one for each KV head, in the order that attention reads them: outputs of
// the first product are tokens and of the second the head's dimensions, in vectors of 16, and bfloat16 inputs go by twos.
//   keys    fp32 [page][kv_heads][head_dim][16]         bf16 [page][kv_heads][head_dim / 2][16][2]
//   values  fp32 [page][kv_heads][head_dim / 16][16][16]  bf16 [page][kv_heads][head_dim / 16][8][16][2]
// int4: for each group of 32 of a token's numbers in one head (16 where 32 do not divide head_dim), their minimum and the
// step between two of the sixteen values, tokens side by side, and then the integers. A word has eight inputs: the even
// ones in its first four nibbles, the odd ones in the last four.
//   keys    [page][kv_heads]: minima fp32 [groups][16], steps bf16 [groups][16], words [head_dim / 8][16]
//   values  [page][kv_heads]: minima fp32 [groups][16], steps bf16 [groups][16], words [head_dim / 16][2][16]
// A block of the pool is one page or several that follow one another.
constexpr int32_t KV_PAGE = 16;
// Keys between two positions where sums are merged.
constexpr int32_t KEY_TILE = 256;
// Query rows (token, head of the group) that pass over a tile of keys while it lies in the second-level cache.
constexpr int32_t UNIT_ROWS = 512;
// Before the sums of a row in `partials`: its maximum and its total; the rest keeps vectors aligned.
constexpr int32_t RESULT_HEAD = 16;

// Some consecutive new tokens of one span.
struct AttentionUnit {
    int32_t span, first_token, tokens;
};

// Attention of the rows of several spans, each the last tokens of one request. Strides are in elements.
struct Attention {
    const void* query;  // [rows][heads][head_dim]
    void *keys, *values;
    const void *new_keys, *new_values;  // [rows][kv_heads][head_dim]
    const int32_t* block_tables;  // [spans]
    const int32_t* lengths;       // [spans], the new tokens counted
    const int32_t* first_rows;    // [spans + 1]
    const float* sinks;           // [heads], or null: scores of a further position whose value is 0
    void* out;
    int64_t query_stride, out_stride, new_stride, table_stride;
    int32_t spans, heads, kv_heads, head_dim, block_tokens, table_blocks, arena_blocks, window;
    int32_t element, kv_element;
    float scale, softcap;

    // Set by library.cpp: what is shared among threads.
    const AttentionUnit* units;
    int32_t unit_count;
    int32_t head_run;  // KV heads of an item of work: 1 or all
    int32_t parts;     // in which a unit's tiles are cut; above 1, results of tiles go to `partials` and are merged later
    float* partials;   // [kv_heads][units][partial_tiles][partial_stride]
    int32_t partial_tiles, partial_stride;
};

static inline int64_t result_width(const Attention& a) { return RESULT_HEAD + int64_t{a.head_dim}; }

// Rows of several spans, each the next tokens of one request, through a causal convolution of every channel by itself,
// then silu if `activated`. What a request needs of its past lies in its slot and is brought up to date; or, with
// `row_slots`, what lies in its slot stays, and what is behind each row goes into that row's.
constexpr int32_t MOST_TAPS = 8, CONVOLUTION_CHANNELS = 256;
struct Convolution {
    const void* x;       // [rows][channels]
    const void* weight;  // [channels][taps], the token's own last
    const void* bias;    // [channels], or null
    void* tails;         // [slots][taps - 1][channels]: the last inputs, the oldest first
    void* out;           // [rows][channels]
    const int32_t* slots;       // [spans]
    const int32_t* first_rows;  // [spans + 1]
    const int32_t* row_slots;   // [rows], or null
    int64_t x_stride;
    int32_t spans, slot_count, channels, taps, activated, element;
};

// Items of work for each span.
static inline int32_t convolution_pieces(const Convolution& c) {
    return (c.channels + CONVOLUTION_CHANNELS - 1) / CONVOLUTION_CHANNELS;
}

// The gated delta rule for the rows of several spans; each key head serves value_heads / key_heads value heads.
constexpr int32_t MOST_KEY_DIM = 512, DELTA_COLUMNS = 64;
struct DeltaRule {
    const void *query, *key;          // [rows][key_heads][key_dim]
    const void* value;                // [rows][value_heads][value_dim]
    const float* log_decay;           // [rows][value_heads], or [rows][value_heads][key_dim] if `by_channel`
    const float* beta;                // [rows][value_heads]
    float* states;                    // [slots][value_heads][key_dim][value_dim]
    void* out;                        // [rows][value_heads][value_dim]
    const int32_t* slots;             // [spans]
    const int32_t* first_rows;        // [spans + 1]
    const int32_t* row_slots;         // [rows], or null, as of a convolution
    int64_t query_stride, key_stride, value_stride;
    int32_t spans, slot_count, key_heads, value_heads, key_dim, value_dim, by_channel, element;
};

// Items of work for each span and value head.
static inline int32_t delta_pieces(const DeltaRule& d) { return (d.value_dim + DELTA_COLUMNS - 1) / DELTA_COLUMNS; }

// The selective scan of Mamba2 for the rows of several spans; each group's b and c serve heads / groups heads.
constexpr int32_t MOST_STATE_DIM = 512, SCAN_COLUMNS = 64;
struct SelectiveScan {
    const void* x;                               // [rows][heads][head_dim]
    const void *b, *c;                           // [rows][groups][state_dim]
    const void* step;                            // [rows][heads]
    const float *step_bias, *log_rate, *skip;    // [heads]
    float* states;                               // [slots][heads][state_dim][head_dim]
    float* out;                                  // [rows][heads][head_dim]
    const int32_t* slots;                        // [spans]
    const int32_t* first_rows;                   // [spans + 1]
    const int32_t* row_slots;                    // [rows], or null, as of a convolution
    int64_t x_stride, b_stride, c_stride, step_stride;
    float least_step, most_step;
    int32_t spans, slot_count, groups, heads, head_dim, state_dim, element;
};

// Items of work for each span and head.
static inline int32_t scan_pieces(const SelectiveScan& s) { return (s.head_dim + SCAN_COLUMNS - 1) / SCAN_COLUMNS; }

// Rows times silu of their gates, with an RMS norm of each group of a row behind that, before it, or without one.
struct GatedNorm {
    float* x;            // [rows][width], overwritten
    const void* gate;    // [rows][width]
    const void* weight;  // [width], or null without a norm
    void* out;           // [rows][width]
    int64_t gate_stride;
    float eps;
    int32_t rows, width, groups, gate_first, element;
};

// Cosines and sines of positions, [rows][2 * pairs] each, with both halves alike, times `scaling`.
struct Angles {
    const int64_t* positions;   // [rows]
    const float* frequencies;   // [pairs], radians from one position to the next
    void *cos, *sin;            // [rows][2 * pairs]
    int32_t rows, pairs;
    float scaling;
    int32_t element;
};

// The last one is cap * tanh(x / cap).
enum : int32_t { ACTIVATION_GELU = 0, ACTIVATION_QUICK_GELU = 1, ACTIVATION_SOFTCAP = 2 };

// The experts of each row and their shares: the `chosen` largest of softmax, or of sigmoid, with a correction added, which
// shares are without. Of several groups the `kept_groups` are chosen from whose best two are largest together. Of equal
// values the first ones are chosen.
constexpr int32_t MOST_EXPERTS = 1024;
// Added to the sum of shares that are normalised: sigmoids may all be 0.
constexpr float LEAST_SHARES = 1e-20f;
struct Routing {
    const void* logits;       // [rows][experts]
    const float* correction;  // [experts], or null
    int64_t* places;          // [rows][chosen], the largest first
    float* shares;            // [rows][chosen]
    float scale;
    int32_t rows, experts, chosen, groups, kept_groups, sigmoid, normalised, element;
};

// Where rms_norm rounds: before it multiplies by the weight, or once, behind 1 + weight or the weight.
enum : int32_t { NORM_PLAIN = 0, NORM_UNIT_OFFSET = 1, NORM_ROUNDED_LAST = 2 };

// How the tokens of one request are chosen, as `Sampling` of generation.py says.
struct Choice {
    double temperature, top_p, penalty;
    double reach;  // added to the largest logit, the least that min_p keeps
    uint64_t seed;
    const uint8_t* seen;    // [vocab], 1 for the tokens that the repetition penalty counts; or null
    const int32_t* moved;   // [moved_count] tokens whose logits something is added to, each once
    const double* offsets;  // [moved_count]
    int32_t top_k, logprobs, top_logprobs, moved_count;
};

// Instead of a token: the logits are not finite; numbers this large are left to the caller.
enum : int32_t { NOT_FINITE = -1, NOT_TAKEN = -2 };

// What comes of a row. Behind the pointers, which the caller sets, is room for the `top_logprobs` likeliest.
struct Sampled {
    double logprob;
    double* top_logprobs;
    int32_t* top_tokens;
    int32_t token;
};

// A row of logits [vocab] of each of several requests, and the position to choose for.
struct SampledRows {
    const void* logits;
    int64_t stride;
    const Choice* const* choices;
    const uint64_t* positions;
    Sampled* out;
    int32_t vocab, element;
};

struct Kernels {
    void (*linear)(const Linear&, const Activations&, const Output&, int32_t first_panel, int32_t end_panel);
    // Writes one row, and its scale and offset of each group `rows` numbers behind the last group's.
    void (*quantize)(const Linear&, const void* x, int32_t element, int32_t rows, int8_t* row, float* scales,
                     int32_t* offsets);
    // One row of rms_norm; `residual` may be null. Both outputs are written.
    void (*rms_norm)(const void* x, const void* residual, const void* weight, void* normalised, void* sum,
                     int32_t width, float eps, int32_t form, int32_t element);
    void (*gated_head_norm)(const void* x, const void* gate, const void* weight, void* out, int32_t width, float eps,
                       int32_t element);
    void (*sigmoid_gate)(void* values, const void* gate, int32_t width, int32_t element);
    void (*swiglu)(const void* gate_up, void* out, int32_t inner, int32_t element);
    void (*geglu)(const void* gate_up, void* out, int32_t inner, int32_t element);
    void (*clamped_swiglu)(const void* gate_up, void* out, int32_t inner, float alpha, float limit, int32_t element);
    // One head, rotated in place.
    void (*rotary)(void* head, const void* cos, const void* sin, int32_t rotary_dim, int32_t element,
                   int32_t angle_element);
    // Writes the new keys and values of some KV heads.
    void (*write_kv)(const Attention&, int32_t first_head, int32_t end_head);
    void (*attention)(const Attention&, int32_t first, int32_t end);        // of kv_heads / head_run * units * parts
    void (*merge_attention)(const Attention&, int32_t first, int32_t end);  // of kv_heads * units
    void (*sample)(const SampledRows&, int32_t first, int32_t end);
    void (*convolution)(const Convolution&, int32_t first, int32_t end);  // of spans * convolution_pieces
    void (*delta_rule)(const DeltaRule&, int32_t first, int32_t end);     // of spans * value_heads * delta_pieces
    // One row of all value heads.
    void (*delta_gates)(const void* beta, const void* step, const float* a_log, const float* dt_bias, float* log_decay,
                        float* opened, int32_t heads, int32_t element);
    void (*selective_scan)(const SelectiveScan&, int32_t first, int32_t end);  // of spans * heads * scan_pieces
    void (*gated_norm)(const GatedNorm&, int32_t first, int32_t end);          // of rows
    void (*angles)(const Angles&, int32_t row);
    // One row; `cap` is the softcap's.
    void (*activate)(const void* x, void* out, int32_t width, int32_t activation, float cap, int32_t element);
    void (*route)(const Routing&, int32_t first, int32_t end);  // of rows
    double (*read_rate)(const char* buffer, int64_t bytes);  // GB/s of one thread
    double (*fma_rate)();                                    // GFLOP/s of one thread
};
