// Keeps cores from falling asleep for a while.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Threads that spin at the system's idle priority: they run where nothing else wants to, and whatever does takes the
// core from them at once. Where the system has no such priority nothing spins. Never destroyed.
//
// They share no lock with the thread that computes: one that lost its core while it held a lock would hold up the
// computing until the core has nothing else to do.
class IdleSpin {
   public:
    // As many threads as that spin for so long from now on. Called by one thread at a time, or by several for a like time.
    void keep(int32_t threads, int64_t nanoseconds) {
        until_.store(now() + nanoseconds);
        if (started_.load() < threads) start(threads);
        if (asleep_.load() != 0) wake();
    }

   private:
    static constexpr int PAUSES = 64;  // between two looks at the clock, about a microsecond

    void start(int32_t threads) {
        const int32_t before = started_.exchange(threads);
#if defined(__linux__)
        try {
            for (int32_t i = before; i < threads; i++) std::thread([this] { watch(); }).detach();
        } catch (const std::system_error&) {  // no more to be had, and none needed
        }
#else
        (void)before;
#endif
    }

#if defined(__linux__)
    void watch() {
        const sched_param none = {};
        if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) return;
        for (;;) {
            while (now() < until_.load())
                for (int i = 0; i < PAUSES; i++) pause();
            // Whoever sets `until_` afterwards sees one asleep and changes `rounds_`, so that the wait ends or never begins.
            const int32_t round = rounds_.load();
            asleep_++;
            if (now() >= until_.load()) futex(FUTEX_WAIT_PRIVATE, round);
            asleep_--;
        }
    }

    void wake() {
        rounds_++;
        futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    }

    void futex(int operation, int32_t value) {
        syscall(SYS_futex, reinterpret_cast<int32_t*>(&rounds_), operation, value, nullptr, nullptr, 0);
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }
#else
    void wake() {}
#endif

    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    std::atomic<int64_t> until_{0};
    std::atomic<int32_t> asleep_{0}, started_{0}, rounds_{0};
};
