// The sums of a linear layer's outputs, written to the rows of a call.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace {

template <class T>
ES_INLINE void write(const Linear& linear, const Output& out, int row, int column, Float16 sums) {
    T* address = static_cast<T*>(out.rows) + row * out.stride + column;
    if (linear.bias) sums += load<Float16>(linear.bias + column);
    int left = linear.out_features - column;
    if (left >= LANES) {
        store_float(address, sums);
    } else {
        for (int i = 0; i < left; i++) put_float(address + i, sums[i]);
    }
}

// `count` vectors of sums of one row, from `column` on.
__attribute__((noinline)) void write_row(const Linear& linear, const Output& out, int row, int column,
                                         const float* sums, int count) {
    for (int v = 0; v < count; v++, column += LANES, sums += LANES) {
        if (out.element == ELEMENT_BF16)
            write<uint16_t>(linear, out, row, column, load<Float16>(sums));
        else
            write<float>(linear, out, row, column, load<Float16>(sums));
    }
}

}  // namespace
