// Splits a range of work among a few threads that wait for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

// Never destroyed: its threads wait until the process ends.
class Threads {
   public:
    // Calls task(first, end) for contiguous parts of [0, count) on up to `threads` threads, this one among them, and
    // returns when all are done. A second caller meanwhile works alone.
    template <class Task>
    void share(int32_t count, int32_t threads, const Task& task) {
        if (threads > count) threads = count;
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (threads <= 1 || !turn.try_lock()) return task(0, count);
        run_ = [](const void* context, int32_t first, int32_t end) { (*static_cast<const Task*>(context))(first, end); };
        context_ = &task;
        count_ = count;
        start(threads);
        part(0);
        while (pending_.load(std::memory_order_acquire) != 0) pause();
    }

   private:
    static constexpr int SPINS = 4000;

    void start(int32_t threads) {
        // A thread that is born now must not take an earlier round for its first.
        const uint64_t round = round_.load(std::memory_order_relaxed);
        try {
            for (; started_ < threads - 1; started_++)
                std::thread([this, round, i = started_ + 1] { work(i, round); }).detach();
        } catch (const std::system_error&) {
            threads = started_ + 1;  // no more to be had
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            threads_ = threads;
            pending_.store(started_, std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
        }
        awake_.notify_all();
    }

    void work(int32_t index, uint64_t seen) {
        for (;;) {
            for (int spin = 0; spin < SPINS && round_.load(std::memory_order_acquire) == seen; spin++) pause();
            if (round_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                awake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
            }
            seen = round_.load(std::memory_order_acquire);
            if (index < threads_) part(index);
            pending_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    void part(int32_t index) {
        const int64_t count = count_;
        run_(context_, static_cast<int32_t>(count * index / threads_), static_cast<int32_t>(count * (index + 1) / threads_));
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        std::this_thread::yield();
#endif
    }

    std::mutex turn_, mutex_;
    std::condition_variable awake_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int32_t> pending_{0};
    int32_t started_ = 0, threads_ = 0, count_ = 0;
    const void* context_ = nullptr;
    void (*run_)(const void*, int32_t, int32_t) = nullptr;
};
