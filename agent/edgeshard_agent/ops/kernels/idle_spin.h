// Keeps cores from falling asleep for a while.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

// Threads that spin at the system's idle priority: they run where nothing else wants to, and whatever does takes the
// core from them at once. Where the system has no such priority nothing spins. Never destroyed.
class IdleSpin {
   public:
    // As many threads as that spin for so long from now on.
    void keep(int32_t threads, int64_t nanoseconds) {
        until_.store(now() + nanoseconds);
        if (started_ < threads) start(threads);
        if (asleep_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }

   private:
    static constexpr int PAUSES = 64;  // between two looks at the clock, about a microsecond

    void start(int32_t threads) {
#if defined(__linux__)
        std::lock_guard<std::mutex> lock(mutex_);
        try {
            for (; started_ < threads; started_++) std::thread([this] { watch(); }).detach();
        } catch (const std::system_error&) {
            started_ = threads;  // no more to be had, and none needed
        }
#else
        started_ = threads;
#endif
    }

#if defined(__linux__)
    void watch() {
        const sched_param none = {};
        if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) return;
        for (;;) {
            while (now() < until_.load())
                for (int i = 0; i < PAUSES; i++) pause();
            std::unique_lock<std::mutex> lock(mutex_);
            asleep_++;
            wake_.wait(lock, [&] { return now() < until_.load(); });
            asleep_--;
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }
#endif

    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<int64_t> until_{0};
    std::atomic<int32_t> asleep_{0}, started_{0};
};
