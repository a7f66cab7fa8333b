// What this x86-64 CPU can run, asked of the CPU itself: what compilers offer for that (__builtin_cpu_supports) is
// answered by their runtime, and that of ziglang, which makes the wheels, answers no to all.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

struct Cpu {
    bool crc32, avx2, avx512, avx512bf16;
};

inline bool has_all(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Bits of the CPUID instruction's leaves 1 and 7, and of XCR0: what the operating system saves of a thread.
inline Cpu this_cpu() {
    constexpr unsigned FMA = 1u << 12, SSE42 = 1u << 20, OSXSAVE = 1u << 27, AVX = 1u << 28;
    constexpr unsigned AVX2 = 1u << 5, F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31, VNNI = 1u << 11;
    constexpr unsigned BF16 = 1u << 5, SAVES_YMM = 0x6, SAVES_ZMM = 0xe6;
    Cpu cpu = {};
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
    cpu.crc32 = has_all(c, SSE42);
    const bool fused = has_all(c, FMA | OSXSAVE | AVX);
    if (!fused || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
    unsigned saved, high;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    cpu.avx2 = has_all(saved, SAVES_YMM) && has_all(b, AVX2);
    cpu.avx512 = cpu.avx2 && has_all(saved, SAVES_ZMM) && has_all(b, F | DQ | BW | VL) && has_all(c, VNNI);
    cpu.avx512bf16 = cpu.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has_all(a, BF16);
    return cpu;
}

}  // namespace
#endif
