// The C interface: picks the kernels for this CPU, prepares activations, shares work among threads.
#include "library.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu.h"
#include "idle_spin.h"
#include "threads.h"

// hatch_build.py lists in ES_COMPILED the kernels that it has compiled: ES_KERNELS(portable) ES_KERNELS(avx2) and so on.
#define ES_KERNELS(name) extern const Kernels kernels_##name;
ES_COMPILED
#undef ES_KERNELS

#define ES_TEXT_OF(number) #number
#define ES_TEXT(number) ES_TEXT_OF(number)
#if defined(__clang__)
#define ES_COMPILER "clang " ES_TEXT(__clang_major__) "." ES_TEXT(__clang_minor__) "." ES_TEXT(__clang_patchlevel__)
#else
#define ES_COMPILER "gcc " ES_TEXT(__GNUC__) "." ES_TEXT(__GNUC_MINOR__) "." ES_TEXT(__GNUC_PATCHLEVEL__)
#endif

namespace {

// Up to so many new tokens, sharing out the smaller parts of the work costs more than it gains.
constexpr int32_t FEW_TOKENS = 32;

struct Choice {
    const char* name;
    const Kernels* kernels;
};

#define ES_KERNELS(name) {#name, &kernels_##name},
const Choice compiled[] = {ES_COMPILED};
#undef ES_KERNELS

const std::vector<const char*> cpu_sets = runnable_sets();

// The best first.
std::vector<Choice> runnable() {
    std::vector<Choice> choices;
    for (const char* name : cpu_sets)
        for (const Choice& choice : compiled)
            if (std::strcmp(choice.name, name) == 0) choices.push_back(choice);
    return choices;
}

const std::vector<Choice> choices = runnable();
Choice chosen = choices.front();
Threads* threads = new Threads;
IdleSpin* awake = new IdleSpin;
// A forked process has its parent's memory, but none of its threads: it begins with new ones.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
    threads = new Threads;
    awake = new IdleSpin;
});

// The integer kernels' copy of the activations, kept between calls; one for each calling thread.
struct Scratch {
    std::vector<int8_t> rows;
    std::vector<float> scales;
    std::vector<int32_t> offsets;
};
thread_local Scratch scratch;

Activations quantized(const Linear& linear, const char* x, int64_t row_bytes, int32_t rows, int32_t element) {
    const int64_t groups = linear.in_padded / linear.group;
    scratch.rows.resize(static_cast<size_t>(rows) * linear.in_padded);
    scratch.scales.resize(static_cast<size_t>(rows * groups));
    scratch.offsets.resize(static_cast<size_t>(rows * groups * (linear.group ? sums_of_run(linear.scheme) : 1)));
    for (int64_t r = 0; r < rows; r++)
        chosen.kernels->quantize(linear, x + r * row_bytes, element, rows, scratch.rows.data() + r * linear.in_padded,
                                 scratch.scales.data() + r, scratch.offsets.data() + r);
    return {scratch.rows.data(), linear.in_padded, scratch.scales.data(), scratch.offsets.data(), rows};
}

bool is_within(const Attention& a, int32_t span) {
    const int64_t length = a.lengths[span];
    if (length < a.first_rows[span + 1] - a.first_rows[span]) return false;
    if (length < 1 || length > static_cast<int64_t>(a.table_blocks) * a.block_tokens) return false;
    for (int64_t b = 0; b * a.block_tokens < length; b++) {
        const int32_t block = a.block_tables[span * a.table_stride + b];
        if (block < 0 || block >= a.arena_blocks) return false;
    }
    return true;
}

// Attention's work as it is shared out, kept between calls.
struct Work {
    std::vector<AttentionUnit> units;
    std::vector<float> partials;
};
thread_local Work work;

void cut_into_units(Attention& a) {
    const int32_t group = a.heads / a.kv_heads, most = group < UNIT_ROWS ? UNIT_ROWS / group : 1;
    work.units.clear();
    for (int32_t s = 0; s < a.spans; s++) {
        const int32_t tokens = a.first_rows[s + 1] - a.first_rows[s];
        for (int32_t first = 0; first < tokens; first += most)
            work.units.push_back({s, first, tokens - first < most ? tokens - first : most});
    }
    a.units = work.units.data();
    a.unit_count = static_cast<int32_t>(work.units.size());
}

// Few rows are limited by how fast their keys are read, which lie head after head: so an item takes all heads, unless that
// leaves too few items. A few long requests keep all threads busy only if their contexts are cut as well.
void share_out(Attention& a, int32_t thread_count) {
    int32_t tokens = 1, length = 0;
    for (const AttentionUnit& unit : work.units) {
        tokens = unit.tokens > tokens ? unit.tokens : tokens;
        length = a.lengths[unit.span] > length ? a.lengths[unit.span] : length;
    }
    a.parts = 1;
    a.head_run = tokens <= FEW_TOKENS ? a.kv_heads : 1;
    if (thread_count < 2 || tokens > FEW_TOKENS || a.unit_count >= 8 * thread_count) return;
    const int32_t tiles = (length + KEY_TILE - 1) / KEY_TILE;
    if (tiles < 2) {
        if (a.unit_count % thread_count) a.head_run = 1;
        return;
    }
    a.parts = tiles < 4 * thread_count ? tiles : 4 * thread_count;
    a.partial_tiles = tiles;
    a.partial_stride = static_cast<int32_t>(tokens * (a.heads / a.kv_heads) * result_width(a));
    const size_t needed = static_cast<size_t>(a.kv_heads) * a.unit_count * tiles * a.partial_stride;
    if (work.partials.size() < needed) work.partials.resize(needed);
    a.partials = work.partials.data();
}

// The first span of which there is a slot that there is not, or -1.
template <class Call>
int32_t without_slot(const Call& call) {
    auto is_there = [&](int32_t slot) { return slot >= 0 && slot < call.slot_count; };
    for (int32_t s = 0; s < call.spans; s++) {
        if (!is_there(call.slots[s])) return s;
        for (int32_t row = call.first_rows[s]; call.row_slots && row < call.first_rows[s + 1]; row++)
            if (!is_there(call.row_slots[row])) return s;
    }
    return -1;
}

int64_t size_of(int32_t element) { return element == ELEMENT_BF16 ? 2 : 4; }

}  // namespace

extern "C" {

const char* edgeshard_sources() { return ES_SOURCES; }

const char* edgeshard_kernel_set() { return ES_COMPILER " " ES_FLAGS; }

const char* edgeshard_kernels(int32_t index) {
    return index >= 0 && index < static_cast<int32_t>(choices.size()) ? choices[index].name : nullptr;
}

const char* edgeshard_cpu_kernels(int32_t index) {
    return index >= 0 && index < static_cast<int32_t>(cpu_sets.size()) ? cpu_sets[index] : nullptr;
}

const char* edgeshard_requested_kernels() { return ES_REQUESTED; }

void edgeshard_use_kernels(int32_t index) { chosen = choices[index]; }

void edgeshard_linear(const Linear* linear, const void* x, int64_t x_stride, int32_t rows, void* out,
                      int64_t out_stride, int32_t element, int32_t thread_count) {
    const int64_t row_bytes = x_stride * size_of(element);
    char* first_output = static_cast<char*>(out);
    for (; linear; linear = linear->next) {
        Activations activations{x, row_bytes, nullptr, nullptr, rows};
        if (linear->group) activations = quantized(*linear, static_cast<const char*>(x), row_bytes, rows, element);
        const Output output{first_output, out_stride, element};
        threads->share(linear->panels, thread_count, [&](int32_t first, int32_t end) {
            chosen.kernels->linear(*linear, activations, output, first, end);
        });
        first_output += linear->out_features * size_of(element);
    }
}

void edgeshard_rms_norm(const void* x, const void* residual, const void* weight, void* normalised, void* sum,
                        int32_t rows, int32_t width, float eps, int32_t form, int32_t element) {
    const int64_t row_bytes = width * size_of(element);
    for (int64_t offset = 0; offset < rows * row_bytes; offset += row_bytes)
        chosen.kernels->rms_norm(static_cast<const char*>(x) + offset,
                                 residual ? static_cast<const char*>(residual) + offset : nullptr, weight,
                                 static_cast<char*>(normalised) + offset, static_cast<char*>(sum) + offset, width, eps,
                                 form, element);
}

void edgeshard_gated_head_norm(const void* x, const void* gate, int64_t gate_stride, const void* weight, void* out,
                          int32_t rows, int32_t heads, int32_t width, float eps, int32_t element) {
    const int64_t size = size_of(element);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t offset = (r * heads + h) * width * size;
            chosen.kernels->gated_head_norm(static_cast<const char*>(x) + offset,
                                       static_cast<const char*>(gate) + (r * gate_stride + h * width) * size, weight,
                                       static_cast<char*>(out) + offset, width, eps, element);
        }
}

void edgeshard_sigmoid_gate(void* values, const void* gate, int64_t gate_stride, int32_t rows, int32_t width,
                            int32_t element) {
    const int64_t size = size_of(element);
    for (int64_t r = 0; r < rows; r++)
        chosen.kernels->sigmoid_gate(static_cast<char*>(values) + r * width * size,
                                     static_cast<const char*>(gate) + r * gate_stride * size, width, element);
}

void edgeshard_idle_spin(int32_t cores, int64_t nanoseconds) { awake->keep(cores, nanoseconds); }

void edgeshard_swiglu(const void* gate_up, void* out, int32_t rows, int32_t inner, int32_t element) {
    const int64_t row_bytes = inner * size_of(element);
    for (int64_t r = 0; r < rows; r++)
        chosen.kernels->swiglu(static_cast<const char*>(gate_up) + 2 * r * row_bytes,
                               static_cast<char*>(out) + r * row_bytes, inner, element);
}

void edgeshard_geglu(const void* gate_up, void* out, int32_t rows, int32_t inner, int32_t element) {
    const int64_t row_bytes = inner * size_of(element);
    for (int64_t r = 0; r < rows; r++)
        chosen.kernels->geglu(static_cast<const char*>(gate_up) + 2 * r * row_bytes,
                              static_cast<char*>(out) + r * row_bytes, inner, element);
}

void edgeshard_clamped_swiglu(const void* gate_up, void* out, int32_t rows, int32_t inner, float alpha, float limit,
                              int32_t element) {
    const int64_t row_bytes = inner * size_of(element);
    for (int64_t r = 0; r < rows; r++)
        chosen.kernels->clamped_swiglu(static_cast<const char*>(gate_up) + 2 * r * row_bytes,
                                       static_cast<char*>(out) + r * row_bytes, inner, alpha, limit, element);
}

void edgeshard_activate(const void* x, int64_t stride, void* out, int32_t rows, int32_t width, int32_t activation,
                        float cap, int32_t element) {
    const int64_t size = size_of(element);
    for (int64_t r = 0; r < rows; r++)
        chosen.kernels->activate(static_cast<const char*>(x) + r * stride * size,
                                 static_cast<char*>(out) + r * width * size, width, activation, cap, element);
}

void edgeshard_route(const Routing* routing, int32_t thread_count) {
    threads->share(routing->rows, routing->rows > FEW_TOKENS ? thread_count : 1,
                   [&](int32_t first, int32_t end) { chosen.kernels->route(*routing, first, end); });
}

void edgeshard_angles(const Angles* angles) {
    for (int32_t r = 0; r < angles->rows; r++) chosen.kernels->angles(*angles, r);
}

void edgeshard_rotary(void* x, int64_t row_stride, int32_t rows, int32_t heads, int32_t head_dim, int32_t element,
                      const void* cos, const void* sin, int32_t rotary_dim, int32_t angle_element) {
    const int64_t angle_bytes = rotary_dim * size_of(angle_element);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            chosen.kernels->rotary(static_cast<char*>(x) + (r * row_stride + h * head_dim) * size_of(element),
                                   static_cast<const char*>(cos) + r * angle_bytes,
                                   static_cast<const char*>(sin) + r * angle_bytes, rotary_dim, element, angle_element);
}

int32_t edgeshard_attention(const Attention* attention, int32_t thread_count) {
    Attention a = *attention;
    for (int32_t s = 0; s < a.spans; s++)
        if (!is_within(a, s)) return s;
    const int32_t rows = a.first_rows[a.spans];
    threads->share(a.kv_heads, rows > FEW_TOKENS ? thread_count : 1,
                   [&](int32_t first, int32_t end) { chosen.kernels->write_kv(a, first, end); });
    cut_into_units(a);
    share_out(a, thread_count);
    threads->share(a.kv_heads / a.head_run * a.unit_count * a.parts, thread_count,
                   [&](int32_t first, int32_t end) { chosen.kernels->attention(a, first, end); });
    if (a.parts > 1)
        threads->share(a.kv_heads * a.unit_count, thread_count,
                       [&](int32_t first, int32_t end) { chosen.kernels->merge_attention(a, first, end); });
    return -1;
}

int32_t edgeshard_convolution(const Convolution* convolution, int32_t thread_count) {
    const int32_t refused = without_slot(*convolution);
    if (refused < 0)
        threads->share(convolution->spans * convolution_pieces(*convolution), thread_count,
                       [&](int32_t first, int32_t end) { chosen.kernels->convolution(*convolution, first, end); });
    return refused;
}

int32_t edgeshard_delta_rule(const DeltaRule* rule, int32_t thread_count) {
    const int32_t refused = without_slot(*rule);
    if (refused < 0)
        threads->share(rule->spans * rule->value_heads * delta_pieces(*rule), thread_count,
                       [&](int32_t first, int32_t end) { chosen.kernels->delta_rule(*rule, first, end); });
    return refused;
}

void edgeshard_delta_gates(const void* beta, const void* step, int64_t stride, const float* a_log, const float* dt_bias,
                           float* log_decay, float* opened, int32_t rows, int32_t heads, int32_t element) {
    const int64_t row_bytes = stride * size_of(element);
    for (int64_t r = 0; r < rows; r++)
        chosen.kernels->delta_gates(static_cast<const char*>(beta) + r * row_bytes,
                                    static_cast<const char*>(step) + r * row_bytes, a_log, dt_bias,
                                    log_decay + r * heads, opened + r * heads, heads, element);
}

int32_t edgeshard_selective_scan(const SelectiveScan* scan, int32_t thread_count) {
    const int32_t refused = without_slot(*scan);
    if (refused < 0)
        threads->share(scan->spans * scan->heads * scan_pieces(*scan), thread_count,
                       [&](int32_t first, int32_t end) { chosen.kernels->selective_scan(*scan, first, end); });
    return refused;
}

void edgeshard_gated_norm(const GatedNorm* norm, int32_t thread_count) {
    threads->share(norm->rows, thread_count,
                   [&](int32_t first, int32_t end) { chosen.kernels->gated_norm(*norm, first, end); });
}

double edgeshard_read_rate(int64_t bytes) {
    constexpr int64_t HUGE_PAGE = 2 << 20;
    const size_t size = static_cast<size_t>(bytes + HUGE_PAGE);
    void* mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return 0.0;
    char* buffer = static_cast<char*>(mapping);
    buffer += -reinterpret_cast<intptr_t>(buffer) & (HUGE_PAGE - 1);
#if defined(MADV_HUGEPAGE)
    madvise(buffer, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // without them ordinary pages do
#endif
    std::memset(buffer, 1, static_cast<size_t>(bytes));  // pages that were never written share one of zeros
    const double rate = chosen.kernels->read_rate(buffer, bytes);
    munmap(mapping, size);
    return rate;
}

double edgeshard_fma_rate() { return chosen.kernels->fma_rate(); }

void edgeshard_sample(const SampledRows* sampled, int32_t rows, int32_t thread_count) {
    threads->share(rows, thread_count,
                   [&](int32_t first, int32_t end) { chosen.kernels->sample(*sampled, first, end); });
}
}
