// Functions of sixteen lanes that only some activations need.
#pragma once

#include "vectors.h"

namespace {

// erf(x) within 1.2 units in the last place, measured over all floats with fused operations. Below 0.93 it is a polynomial
// of x * x, from there on 1 - e^-q with a polynomial q of the magnitude, and 1 from 4 on. Both are Chebyshev fits of ours.
ES_INLINE Float16 erf16(Float16 x) {
    const Float16 size = magnitude16(x), z = x * x;
    Float16 near = splat(8.2041696762e-5f);
    near = fma16(near, z, splat(-8.1029155610e-4f));
    near = fma16(near, z, splat(5.1974872266e-3f));
    near = fma16(near, z, splat(-2.6857959063e-2f));
    near = fma16(near, z, splat(1.1283669469e-1f));
    near = fma16(near, z, splat(-3.7612632047e-1f));
    near = fma16(near, z, splat(1.2837916646e-1f));
    near = fma16(near, x, x);
    const Float16 t = min16(splat(4.0f), size);
    Float16 q = splat(-1.6434872028e-6f);
    q = fma16(q, t, splat(4.6178000156e-5f));
    q = fma16(q, t, splat(-5.9776106950e-4f));
    q = fma16(q, t, splat(4.7637494665e-3f));
    q = fma16(q, t, splat(-2.6431814337e-2f));
    q = fma16(q, t, splat(1.1009649436e-1f));
    q = fma16(q, t, splat(6.3181163636e-1f));
    q = fma16(q, t, splat(1.3023979103e-1f));
    q = fma16(q, t, splat(-3.2111130021e-4f));
    const Float16 far = splat(1.0f) - exp16(-(q + t));
    const Word16 is_near = (Word16)(size < splat(0.93f)), sign = (Word16)x & 0x80000000u;
    return (Float16)((is_near & (Word16)near) | (~is_near & ((Word16)far | sign)));
}

}  // namespace
