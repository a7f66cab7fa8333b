// Compares linear layers of a compiled library with scalar code, bit for bit; test_compiled_kernels.py runs it.
//
//     linear_reference LIBRARY KERNELS fused|separate [SCHEME...]
//     linear_reference LIBRARY
//
// The second form prints the names of the kernels that this CPU runs.
//
// `fused` means one rounding for a product and its sum, as every instruction set with FMA has it. Prints one line for
// each scheme: its name, the number of outputs that differ, the number of outputs, and a hash of all of them. The exit
// status is 1 if an output differs, and 2 if the library or the kernels are missing.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace {

constexpr int PANEL = 32;
constexpr int MAX_ROWS = 13;
constexpr float NEGLIGIBLE = 1e-30f;

using Bytes = std::vector<uint8_t>;

bool is_fused;

// noinline, and volatile below: the compiler of this file must neither fuse nor reorder what it defines.
__attribute__((noinline)) float multiply_add(float a, float b, float c) {
    if (is_fused) return std::fmaf(a, b, c);
    const volatile float product = a * b;
    return product + c;
}

float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float from_bf16(uint16_t half) { return bits_to_float(static_cast<uint32_t>(half) << 16); }

uint16_t to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// A normal number of IEEE half precision; scales here are no others.
float from_half(uint16_t half) {
    const float magnitude = bits_to_float(static_cast<uint32_t>(half & 0x7fffu) << 13) * 0x1p112f;
    return half & 0x8000u ? -magnitude : magnitude;
}

class Random {
   public:
    explicit Random(uint64_t seed) : _state(seed * 2 + 1) {}

    uint32_t next() {
        _state = _state * 6364136223846793005ull + 1442695040888963407ull;
        return static_cast<uint32_t>(_state >> 33);
    }

    // The sum of four uniform numbers: near zero more often than far from it, in [-1, 1].
    float number() {
        float sum = 0;
        for (int i = 0; i < 4; i++) sum += static_cast<float>(next() % 65536u) / 131072.0f - 0.25f;
        return sum;
    }

   private:
    uint64_t _state;
};

struct Case {
    Scheme scheme;
    Element element;
    bool half_scales, has_bias;
    int rows, group, in_features, out_features;

    int in_padded() const {
        const int step = group ? group : scheme == BF16 ? 2 : 1;
        return (in_features + step - 1) / step * step;
    }
    int panels() const { return (out_features + PANEL - 1) / PANEL; }
    int bits() const { return scheme == INT8 ? 8 : scheme == INT4 ? 4 : 2; }
    int inputs_of_chunk() const { return 32 / bits(); }
    int64_t group_bytes() const { return 2 * PANEL + int64_t{PANEL} * group * bits() / 8; }
    int64_t panel_bytes() const {
        if (!group) return int64_t{PANEL} * in_padded() * (scheme == BF16 ? 2 : 4);
        return group_bytes() * (in_padded() / group);
    }
};

// Packed weights as kernels.h lays them out, in memory aligned as the agent's.
struct Weights {
    uint8_t* bytes;

    explicit Weights(int64_t size) {
        // The kernels may ask for what follows the last panel, and never use it.
        bytes = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(size + 63) / 64 * 64));
    }
    Weights(const Weights&) = delete;
    ~Weights() { std::free(bytes); }

    const uint8_t* group_of(const Case& c, int output, int group) const {
        return bytes + output / PANEL * c.panel_bytes() + group * c.group_bytes();
    }

    float number(const Case& c, int output, int input) const {
        const uint8_t* panel = bytes + output / PANEL * c.panel_bytes();
        const int column = output % PANEL;
        if (c.scheme == FP32) return read<float>(panel, int64_t{input} * PANEL + column);
        return from_bf16(read<uint16_t>(panel, (int64_t{input} / 2 * PANEL + column) * 2 + input % 2));
    }

    float scale(const Case& c, int output, int group) const {
        const uint16_t half = read<uint16_t>(group_of(c, output, group), output % PANEL);
        return c.half_scales ? from_half(half) : from_bf16(half);
    }

    int integer(const Case& c, int output, int group, int input) const {
        const int chunk = input / c.inputs_of_chunk();
        const int inside = input % c.inputs_of_chunk();
        const uint8_t* values = group_of(c, output, group) + 2 * PANEL;
        const int byte = values[(int64_t{chunk} * PANEL + output % PANEL) * 4 + inside % 4];
        const int shifted = byte >> (c.bits() * (inside / 4)) & ((1 << c.bits()) - 1);
        if (c.scheme == INT8) return shifted - 128;
        if (c.scheme == INT4) return shifted - 8;
        return 2 * shifted - 3;
    }

    template <class T>
    static T read(const uint8_t* address, int64_t index) {
        T value;
        std::memcpy(&value, address + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
        return value;
    }
};

void fill(const Case& c, Weights& weights, Random& random) {
    const int64_t size = c.panel_bytes() * c.panels();
    if (!c.group) {
        for (int64_t i = 0; i < size / (c.scheme == BF16 ? 2 : 4); i++) {
            const float value = random.number();
            const uint16_t half = to_bf16(value);
            if (c.scheme == BF16)
                std::memcpy(weights.bytes + 2 * i, &half, 2);
            else
                std::memcpy(weights.bytes + 4 * i, &value, 4);
        }
        return;
    }
    for (int64_t i = 0; i < size; i++) weights.bytes[i] = static_cast<uint8_t>(random.next());
    for (int64_t group = 0; group < size / c.group_bytes(); group++)
        for (int column = 0; column < PANEL; column++) {
            // Of either sign, from 2^-7 to 2^-3.
            uint16_t half = static_cast<uint16_t>(random.next() & 0x83ffu);
            half = c.half_scales ? half | (8 + random.next() % 4) << 10 : (half & 0x807fu) | (120 + random.next() % 4) << 7;
            std::memcpy(weights.bytes + group * c.group_bytes() + 2 * column, &half, 2);
        }
    if (c.scheme != INT8) return;
    // -128 is no value of int8: the packing stores -127 to 127.
    for (int64_t group = 0; group < size / c.group_bytes(); group++)
        for (int64_t i = 2 * PANEL; i < c.group_bytes(); i++) {
            uint8_t& byte = weights.bytes[group * c.group_bytes() + i];
            if (byte == 0) byte = 1;
        }
}

struct Quantized {
    std::vector<int> values;
    float scale;
};

// A group of a row as integers. The product with the inverse is rounded before the sum that rounds to an integer.
Quantized quantize(const std::vector<float>& row, int first, int count) {
    Quantized result = {std::vector<int>(static_cast<size_t>(count)), 0.0f};
    float magnitude = 0;
    for (int i = 0; i < count; i++) magnitude = std::fmax(magnitude, std::fabs(row[first + i]));
    if (magnitude < NEGLIGIBLE) return result;
    result.scale = magnitude / 127.0f;
    const float inverse = 127.0f / magnitude;
    for (int i = 0; i < count; i++) {
        const volatile float product = row[first + i] * inverse;
        const volatile float shifted = product + 12582912.0f;
        result.values[i] = static_cast<int>(float_to_bits(shifted) - 0x4b400000u);
    }
    return result;
}

float float_output(const Case& c, const Weights& weights, const std::vector<float>& row, int output) {
    float sum = 0;
    for (int k = 0; k < c.in_padded(); k++) sum = multiply_add(weights.number(c, output, k), row[k], sum);
    return sum;
}

float integer_output(const Case& c, const Weights& weights, const std::vector<Quantized>& groups, int output) {
    float sum = 0;
    for (int g = 0; g < c.in_padded() / c.group; g++) {
        int dot = 0;
        for (int i = 0; i < c.group; i++) dot += weights.integer(c, output, g, i) * groups[g].values[i];
        const volatile float scale = weights.scale(c, output, g) * groups[g].scale;
        sum = multiply_add(static_cast<float>(dot), scale, sum);
    }
    return sum;
}

using LinearCall = void (*)(const Linear*, const void*, int64_t, int32_t, void*, int64_t, int32_t, int32_t);

// Rows [rows][in_padded] in float32, exactly those that the library reads.
std::vector<std::vector<float>> rows_of(const Case& c, Random& random) {
    std::vector<std::vector<float>> rows(static_cast<size_t>(c.rows));
    for (auto& row : rows) {
        row.resize(static_cast<size_t>(c.in_padded()));
        const float magnitude = std::ldexp(1.0f, static_cast<int>(random.next() % 9) - 4);
        for (int k = 0; k < c.in_features; k++) {
            const float value = random.number() * magnitude;
            row[k] = c.element == ELEMENT_BF16 ? from_bf16(to_bf16(value)) : value;
        }
    }
    // A group of zeros, and one that counts as zeros.
    if (c.group && c.rows > 2) {
        for (int k = 0; k < c.group; k++) rows[1][k] = 0;
        for (int k = 0; k < c.group; k++) rows[2][k] *= 1e-38f;
    }
    return rows;
}

Bytes as_elements(const Case& c, const std::vector<std::vector<float>>& rows) {
    const size_t size = c.element == ELEMENT_BF16 ? 2 : 4;
    const size_t width = static_cast<size_t>(c.in_padded());
    Bytes bytes(rows.size() * width * size);
    for (size_t r = 0; r < rows.size(); r++)
        for (size_t k = 0; k < width; k++) {
            const uint16_t half = to_bf16(rows[r][k]);
            const void* from = size == 2 ? static_cast<const void*>(&half) : static_cast<const void*>(&rows[r][k]);
            std::memcpy(bytes.data() + (r * width + k) * size, from, size);
        }
    return bytes;
}

struct Tally {
    int64_t outputs = 0, different = 0;
    uint64_t hash = 1469598103934665603ull;

    void add(const Case& c, int row, int output, uint32_t actual, uint32_t expected) {
        outputs++;
        hash = (hash ^ actual) * 1099511628211ull;
        if (actual == expected) return;
        if (different++ < 3)
            std::fprintf(stderr, "scheme %d, element %d, %d rows: row %d, output %d is %08x, not %08x\n", c.scheme,
                         c.element, c.rows, row, output, actual, expected);
    }
};

void compare(const Case& c, LinearCall call, Tally& tally, uint64_t seed) {
    Random random(seed);
    Weights weights(c.panel_bytes() * c.panels());
    fill(c, weights, random);
    std::vector<float> bias(static_cast<size_t>(c.panels() * PANEL));
    for (float& value : bias) value = random.number();
    const auto rows = rows_of(c, random);
    const Bytes x = as_elements(c, rows);
    const bool is_bf16 = c.element == ELEMENT_BF16;
    Bytes out(static_cast<size_t>(c.rows) * c.out_features * (is_bf16 ? 2 : 4));
    const Linear linear = {weights.bytes, c.has_bias ? bias.data() : nullptr, c.scheme, c.group, c.in_features,
                           c.in_padded(), c.out_features, c.panels(), c.half_scales};
    call(&linear, x.data(), c.in_padded(), c.rows, out.data(), c.out_features, c.element, 1);
    for (int r = 0; r < c.rows; r++) {
        std::vector<Quantized> groups;
        for (int first = 0; c.group && first < c.in_padded(); first += c.group)
            groups.push_back(quantize(rows[r], first, c.group));
        for (int n = 0; n < c.out_features; n++) {
            float expected = c.group ? integer_output(c, weights, groups, n) : float_output(c, weights, rows[r], n);
            if (c.has_bias) expected += bias[n];
            const int64_t index = int64_t{r} * c.out_features + n;
            if (is_bf16)
                tally.add(c, r, n, Weights::read<uint16_t>(out.data(), index), to_bf16(expected));
            else
                tally.add(c, r, n, Weights::read<uint32_t>(out.data(), index), float_to_bits(expected));
        }
    }
}

struct Named {
    const char* name;
    Scheme scheme;
};
constexpr Named SCHEMES[] = {{"fp32", FP32}, {"bf16", BF16}, {"int8", INT8}, {"int4", INT4}, {"int2", INT2}};

void compare_scheme(Scheme scheme, LinearCall call, Tally& tally) {
    constexpr int OUT_FEATURES = 3 * PANEL - 5;
    uint64_t seed = 100 * static_cast<uint64_t>(scheme);
    for (int rows = 1; rows <= MAX_ROWS; rows++) {
        if (scheme == FP32 || scheme == BF16) {
            const Element element = scheme == FP32 ? ELEMENT_FP32 : ELEMENT_BF16;
            compare({scheme, element, false, rows % 2 == 0, rows, 0, 331, OUT_FEATURES}, call, tally, ++seed);
            continue;
        }
        for (const int group : {32, 64, 128})
            for (const Element element : {ELEMENT_FP32, ELEMENT_BF16})
                for (const bool half_scales : {false, true})
                    compare({scheme, element, half_scales, rows % 2 == 0, rows, group, 331, OUT_FEATURES}, call, tally,
                            ++seed);
    }
}

using NameOf = const char* (*)(int32_t);

NameOf names_of(void* library) { return reinterpret_cast<NameOf>(dlsym(library, "edgeshard_kernels")); }

// Runs these kernels from now on; false if the library has none of this name.
bool use(void* library, const char* name) {
    const NameOf name_of = names_of(library);
    const auto use_index = reinterpret_cast<void (*)(int32_t)>(dlsym(library, "edgeshard_use_kernels"));
    for (int32_t i = 0; name_of(i); i++)
        if (std::strcmp(name_of(i), name) == 0) {
            use_index(i);
            return true;
        }
    return false;
}

bool is_requested(const char* scheme, int count, char** names) {
    for (int i = 0; i < count; i++)
        if (std::strcmp(scheme, names[i]) == 0) return true;
    return count == 0;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2 && count < 4) return 2;
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    if (count == 2) {
        for (int32_t i = 0; names_of(library)(i); i++) std::printf("%s\n", names_of(library)(i));
        return 0;
    }
    if (!use(library, arguments[2])) {
        std::fprintf(stderr, "%s has no kernels %s for this CPU\n", arguments[1], arguments[2]);
        return 2;
    }
    is_fused = std::strcmp(arguments[3], "fused") == 0;
    const auto call = reinterpret_cast<LinearCall>(dlsym(library, "edgeshard_linear"));
    int64_t different = 0;
    for (const Named& one : SCHEMES) {
        if (!is_requested(one.name, count - 4, arguments + 4)) continue;
        Tally tally;
        compare_scheme(one.scheme, call, tally);
        std::printf("%s %lld %lld %016llx\n", one.name, static_cast<long long>(tally.different),
                    static_cast<long long>(tally.outputs), static_cast<unsigned long long>(tally.hash));
        different += tally.different;
    }
    return different != 0;
}
