// The instruction sets that this CPU can run, read from the CPU itself: what compilers offer for that
// (__builtin_cpu_supports) is answered by their runtime, and that of ziglang, which makes the wheels, answers no to all.
#pragma once

#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

struct Cpu {
    bool crc32, avx2, avxvnni, avx512, avx512bf16, dotprod;
};

#if defined(__x86_64__)

inline bool has_all(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Bits of the CPUID instruction's leaves 1 and 7, and of XCR0: what the operating system saves of a thread.
inline Cpu this_cpu() {
    constexpr unsigned FMA = 1u << 12, SSE42 = 1u << 20, OSXSAVE = 1u << 27, AVX = 1u << 28;
    constexpr unsigned AVX2 = 1u << 5, F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31, VNNI = 1u << 11;
    constexpr unsigned AVX_VNNI = 1u << 4, BF16 = 1u << 5, SAVES_YMM = 0x6, SAVES_ZMM = 0xe6;
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
    // A CPU without this part of the leaf returns zeros.
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return cpu;
    cpu.avxvnni = cpu.avx2 && has_all(a, AVX_VNNI);
    cpu.avx512bf16 = cpu.avx512 && has_all(a, BF16);
    return cpu;
}

#elif defined(__aarch64__) && defined(__linux__)

inline Cpu this_cpu() {
    constexpr unsigned long ASIMDDP = 1ul << 20;
    Cpu cpu = {};
    cpu.dotprod = (getauxval(AT_HWCAP) & ASIMDDP) != 0;
    return cpu;
}

#else

inline Cpu this_cpu() { return {}; }

#endif

// Names of the kernels that this CPU can run, the best first; the library may lack some of them.
inline std::vector<const char*> runnable_sets() {
    const Cpu cpu = this_cpu();
    std::vector<const char*> names;
    if (cpu.avx512bf16) names.push_back("avx512bf16");
    if (cpu.avx512) names.push_back("avx512");
    if (cpu.avxvnni) names.push_back("avxvnni");
    if (cpu.avx2) names.push_back("avx2");
    if (cpu.dotprod) names.push_back("dotprod");
    names.push_back("portable");
    return names;
}

}  // namespace
