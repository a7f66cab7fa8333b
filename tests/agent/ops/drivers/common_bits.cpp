// Prints a hash of what each function between the linear layers computes on inputs made by integer arithmetic, one a line:
// its name and 16 hexadecimal digits. test_common_bits.py compiles it by several compilers and for several processors.
// It needs no C++ library, so that an object of one compiler is linked by another.
// With the argument "erf" it prints the largest error of erf16 over all floats in [0, 8), in units in the last place.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "activations.h"
#include "angles.h"
#include "recurrent.h"
#include "routing.h"
#include "unpacked_products.h"

namespace {

// Zeros at first; never freed.
template <class T>
struct Values {
    T* values;
    size_t count;

    explicit Values(size_t size) : values(static_cast<T*>(std::calloc(size, sizeof(T)))), count(size) {}
    T* data() const { return values; }
    size_t size() const { return count; }
    T& operator[](size_t i) const { return values[i]; }
};

struct Hash {
    uint64_t state = 14695981039346656037u;

    template <class T>
    void add(const Values<T>& values) {
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(values.data());
        for (size_t i = 0; i < values.size() * sizeof(T); i++) state = (state ^ bytes[i]) * 1099511628211u;
    }

    void print(const char* name) const { std::printf("%s %016llx\n", name, static_cast<unsigned long long>(state)); }
};

uint64_t seed = 1;

// In [-range, range), from 24 bits of splitmix64.
float number(float range) {
    uint64_t z = seed++ * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (static_cast<float>(z >> 40) * 0x1p-23f - 1.0f) * range;
}

template <class T>
Values<T> numbers(size_t count, float range) {
    Values<T> made(count);
    for (size_t i = 0; i < count; i++) put_float(&made[i], number(range));
    return made;
}

void hash_angles() {
    constexpr int PAIRS = 37;
    Values<int64_t> positions(600);
    for (size_t i = 0; i < 512; i++) positions[i] = static_cast<int64_t>(i);
    int64_t far = 1 << 24;
    for (size_t i = 512; i < 600; i++, far = far * 7 / 8) positions[i] = far;
    Values<float> frequencies = numbers<float>(PAIRS, 1.0f);
    const size_t size = positions.size() * 2 * PAIRS;
    Values<float> cos(size), sin(size);
    Values<uint16_t> cos16(size), sin16(size);
    const int32_t rows = static_cast<int32_t>(positions.size());
    const Angles wide = {positions.data(), frequencies.data(), cos.data(), sin.data(), rows, PAIRS, 1.1f, ELEMENT_FP32};
    const Angles half = {positions.data(), frequencies.data(), cos16.data(), sin16.data(), rows, PAIRS, 1.0f, ELEMENT_BF16};
    for (int32_t row = 0; row < rows; row++) {
        angles(wide, row);
        angles(half, row);
    }
    Hash hash;
    hash.add(cos);
    hash.add(sin);
    hash.add(cos16);
    hash.add(sin16);
    hash.print("angles");
}

template <class Function>
void hash_function(const char* name, float range, const Function& function) {
    Values<float> values = numbers<float>(1 << 16, range);
    for (size_t i = 0; i < values.size(); i += LANES) store(&values[i], function(load<Float16>(&values[i])));
    Hash hash;
    hash.add(values);
    hash.print(name);
}

template <class T>
void hash_rows(const char* name) {
    constexpr int WIDTH = 1003;
    Hash hash;
    Values<T> weight = numbers<T>(WIDTH, 1.0f);
    for (int row = 0; row < 50; row++) {
        Values<T> x = numbers<T>(WIDTH, 3.0f), residual = numbers<T>(WIDTH, 2.0f), out(WIDTH), sum(WIDTH);
        for (int form : {NORM_PLAIN, NORM_UNIT_OFFSET, NORM_ROUNDED_LAST}) {
            rms_norm_row(x.data(), residual.data(), weight.data(), out.data(), sum.data(), WIDTH, 1e-5f, form);
            hash.add(out);
        }
        gated_head_norm_row(x.data(), residual.data(), weight.data(), out.data(), WIDTH, 1e-6f);
        hash.add(out);
        for (int activation : {ACTIVATION_GELU, ACTIVATION_QUICK_GELU, ACTIVATION_SOFTCAP}) {
            activate_row(x.data(), out.data(), WIDTH, activation, 2.5f);
            hash.add(out);
        }
        Values<T> gated(WIDTH / 2);
        swiglu_row(x.data(), gated.data(), WIDTH / 2);
        hash.add(gated);
        geglu_row(x.data(), gated.data(), WIDTH / 2);
        hash.add(gated);
        clamped_swiglu_row(x.data(), gated.data(), WIDTH / 2, 1.702f, 2.0f);
        hash.add(gated);
        sigmoid_gate_row(x.data(), residual.data(), WIDTH);
        hash.add(x);
        rotary_head(x.data(), residual.data(), sum.data(), 2 * 53);
        hash.add(x);
    }
    hash.print(name);
}

void hash_routing() {
    constexpr int ROWS = 200, EXPERTS = 60, CHOSEN = 6;
    const Values<float> correction = numbers<float>(EXPERTS, 0.1f);
    Hash hash;
    for (int form = 0; form < 4; form++) {
        const Values<uint16_t> logits = numbers<uint16_t>(ROWS * EXPERTS, 4.0f);
        Values<int64_t> places(ROWS * CHOSEN);
        Values<float> shares(ROWS * CHOSEN);
        const bool sigmoid = form & 1, grouped = form & 2;
        const Routing routing = {logits.data(), sigmoid ? correction.data() : nullptr, places.data(), shares.data(), 2.5f,
                                 ROWS, EXPERTS, CHOSEN, grouped ? 5 : 1, grouped ? 2 : 1, sigmoid, true, ELEMENT_BF16};
        route(routing, 0, ROWS);
        hash.add(places);
        hash.add(shares);
    }
    hash.print("routing");
}

void print_error_of_erf() {
    double largest = 0.0;
    float worst = 0.0f;
    for (uint32_t bits = 0; bits < 0x41000000u; bits += LANES) {
        float x[LANES], y[LANES];
        for (int i = 0; i < LANES; i++) x[i] = bits_to_float(bits + static_cast<uint32_t>(i));
        store(y, erf16(load<Float16>(x)));
        for (int i = 0; i < LANES; i++) {
            const double right = std::erf(static_cast<double>(x[i]));
            const float near = static_cast<float>(right);
            const double unit = std::nextafter(near, 9.0f) - static_cast<double>(near);
            const double error = std::fabs(y[i] - right) / unit;
            if (error > largest) largest = error, worst = x[i];
        }
    }
    std::printf("%.3f at %.9g\n", largest, static_cast<double>(worst));
}

}  // namespace

template <int32_t SCHEME>
void hash_unpacked(Hash& hash) {
    using Form = Unpacking<SCHEME>;
    constexpr int ROWS = 7, OUTPUTS = 40, INPUTS = 768, PANELS = 2, RUNS = INPUTS / GROUP_STEP;
    Values<uint16_t> weights(PANELS * PANEL * INPUTS / Form::INPUTS * Form::BYTES / 2);
    // Of either sign, below the float16 numbers that are infinite.
    for (size_t i = 0; i < weights.size(); i++)
        weights[i] = static_cast<uint16_t>(static_cast<int>((number(1.0f) + 1.0f) * 0x3a00) | (i % 3 ? 0 : 0x8000));
    Values<uint32_t> table(4096);
    for (size_t i = 0; i < table.size(); i++) table[i] = 0x01010101u * (1 + i % Form::LARGEST);
    Values<int8_t> rows(ROWS * INPUTS);
    for (size_t i = 0; i < rows.size(); i++) rows[i] = static_cast<int8_t>(number(127.0f));
    Values<float> scales = numbers<float>(ROWS * RUNS, 1.0f), out(ROWS * OUTPUTS);
    const int sums = sums_of_run(SCHEME), inputs = GROUP_STEP / sums;
    Values<int32_t> totals(ROWS * RUNS * sums);
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < INPUTS; i++) totals[i / inputs * ROWS + row] += rows[row * INPUTS + i];
    const Linear linear = {weights.data(), nullptr, SCHEME,  GROUP_STEP, INPUTS,      INPUTS,
                           OUTPUTS,        PANELS,  0,       nullptr,    table.data()};
    const Activations x = {rows.data(), INPUTS, scales.data(), totals.data(), ROWS};
    run_unpacked<SCHEME>(linear, x, {out.data(), OUTPUTS, ELEMENT_FP32}, 0, PANELS);
    hash.add(out);
}

template <int32_t... SCHEMES>
void hash_unpacked_formats() {
    Hash hash;
    (hash_unpacked<SCHEMES>(hash), ...);
    hash.print("unpacked");
}

int main(int count, char** arguments) {
    if (count > 1 && !std::strcmp(arguments[1], "erf")) {
        print_error_of_erf();
        return 0;
    }
    hash_angles();
    hash_function("exp", 90.0f, [](Float16 x) { return exp16(x); });
    hash_function("tanh", 10.0f, [](Float16 x) { return tanh16(x); });
    hash_function("erf", 5.0f, [](Float16 x) { return erf16(x); });
    hash_function("softplus", 30.0f, [](Float16 x) { return softplus16(x); });
    hash_rows<float>("rows-fp32");
    hash_rows<uint16_t>("rows-bf16");
    hash_routing();
    // One of each kind; the fingerprint of a library has all.
    hash_unpacked_formats<Q3_K, Q5_1, IQ3_S, IQ2_XS>();
}
