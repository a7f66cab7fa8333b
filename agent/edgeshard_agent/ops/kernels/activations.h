// Activations that stand by themselves; those with a gate in one pass are in layers.h.
#pragma once

#include "layers.h"
#include "math16.h"

namespace {

// Of one row. Numbers are rounded to the element type where torch's operators round them.
template <class T>
void activate_row(const T* x, T* out, int width, int32_t activation, float cap) {
    auto rounded = [&](Float16 values) { return rounded_to(x, values); };
    for (int i = 0; i < width; i += LANES) {
        const Float16 values = load_some(x + i, width - i);
        Float16 found;
        switch (activation) {
            case ACTIVATION_GELU:
                found = values * splat(0.5f) * (splat(1.0f) + erf16(values * splat(0.70710678118654752440f)));
                break;
            case ACTIVATION_QUICK_GELU:
                found = values * rounded(splat(1.0f) / (splat(1.0f) + exp16(-rounded(values * splat(1.702f)))));
                break;
            default: found = rounded(tanh16(rounded(values / splat(cap)))) * splat(cap);
        }
        store_some(out + i, found, width - i);
    }
}

void activate(const void* x, void* out, int32_t width, int32_t activation, float cap, int32_t element) {
    if (element == ELEMENT_BF16)
        activate_row(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out), width, activation, cap);
    else
        activate_row(static_cast<const float*>(x), static_cast<float*>(out), width, activation, cap);
}

}  // namespace
