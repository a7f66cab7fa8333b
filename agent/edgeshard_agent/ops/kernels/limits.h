// The limits of this machine for one thread: the rate at which it reads memory, and the rate of its multiply-adds.
// Products are compared with them, so both loops do nothing else and use the registers that products use.
#pragma once

#include <time.h>

#include "vectors.h"

namespace {

// Enough chains of multiply-adds for two pipes with a latency of four to six cycles; they fit 16 registers.
constexpr int CHAINS = 12 / PARTS;
constexpr int CHAIN_STEPS = 100000;
// The best of some turns counts: another process, or a clock that has yet to rise, makes a turn slower, never faster.
constexpr int FMA_TURNS = 100, READ_TURNS = 4;

inline double thread_seconds() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

inline float run_chains(float factor, float term) {
    const Float16 factors = splat(factor);
    const Float16 terms = splat(term);
    Float16 sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = splat(static_cast<float>(i));
#pragma GCC unroll 1
    for (int step = 0; step < CHAIN_STEPS; step++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = fma16(sums[i], factors, terms);
    for (int i = 1; i < CHAINS; i++) sums[0] = sums[0] + sums[i];
    return sum_lanes(sums[0]);
}

// GFLOP/s of float32 multiply-adds, two operations each.
inline double fma_rate() {
    volatile float factor = 0.999f, result = 0.0f;
    double best = 0.0;
    for (int turn = 0; turn < FMA_TURNS; turn++) {
        const double begin = thread_seconds();
        result = run_chains(factor, 0.001f);
        const double seconds = thread_seconds() - begin;
        const double rate = 2.0 * LANES * CHAINS * CHAIN_STEPS / seconds * 1e-9;
        best = rate > best ? rate : best;
    }
    (void)result;
    return best;
}

// With AHEAD 0 only the processor prefetches.
template <int AHEAD>
inline uint32_t read_all(const char* buffer, int64_t bytes) {
    Word16 first = {}, second = {};
#pragma GCC unroll 1
    for (int64_t at = 0; at + 128 <= bytes; at += 128) {
        if constexpr (AHEAD > 0) {
            __builtin_prefetch(buffer + at + AHEAD, 0, 2);
            __builtin_prefetch(buffer + at + AHEAD + 64, 0, 2);
        }
        first = first ^ load<Word16>(buffer + at);
        second = second ^ load<Word16>(buffer + at + 64);
    }
    return (first ^ second)[0];
}

template <int AHEAD>
inline double read_rate_with(const char* buffer, int64_t bytes) {
    volatile uint32_t result = 0;
    double best = 0.0;
    for (int turn = 0; turn < READ_TURNS; turn++) {
        const double begin = thread_seconds();
        result = read_all<AHEAD>(buffer, bytes);
        const double rate = static_cast<double>(bytes) / (thread_seconds() - begin) * 1e-9;
        best = rate > best ? rate : best;
    }
    (void)result;
    return best;
}

// GB/s of a stream over `bytes` bytes, with fetches ahead or without, whichever is faster.
inline double read_rate(const char* buffer, int64_t bytes) {
    const double plain = read_rate_with<0>(buffer, bytes);
    const double fetched = read_rate_with<512>(buffer, bytes);
    return plain > fetched ? plain : fetched;
}

}  // namespace
