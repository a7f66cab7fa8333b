// Splits a range of work among a few threads that wait for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

// Never destroyed: its threads wait until the process ends.
//
// Work is cut into more pieces than there are threads, and each thread takes the next one that is left. A thread that the
// system runs late, because others use its core, takes few or none: the caller never waits for one that has not begun.
class Threads {
   public:
    // Calls task(first, end) for contiguous parts of [0, count) on up to `threads` threads, this one among them, and
    // returns when all are done. A second caller meanwhile works alone.
    template <class Task>
    void share(int32_t count, int32_t threads, const Task& task) {
        if (threads > count) threads = count;
        if (threads > MOST_THREADS) threads = MOST_THREADS;
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (threads <= 1 || !turn.try_lock()) return task(0, count);
        run_ = [](const void* context, int32_t first, int32_t end) { (*static_cast<const Task*>(context))(first, end); };
        context_ = &task;
        count_ = count;
        pieces_ = count < threads * PIECES ? count : threads * PIECES;
        done_.store(0, std::memory_order_relaxed);
        start(threads);
        while (take_piece()) {
        }
        for (int spin = 0; done_.load(std::memory_order_acquire) != pieces_; spin++)
            spin < SPINS ? pause() : std::this_thread::yield();
    }

   private:
    static constexpr int SPINS = 4000;
    static constexpr int32_t PIECES = 4, MOST_THREADS = 255;

    // A round of work, the threads that take part, how many pieces it has and which is next: all in one number, so that a
    // piece can be taken only of the round that it belongs to.
    static constexpr int THREADS_AT = 24, PIECES_AT = 12, ROUND_AT = 32;
    static constexpr uint64_t PIECE_MASK = 0xfff;
    static uint64_t round_of(uint64_t state) { return state >> ROUND_AT; }
    static int32_t threads_of(uint64_t state) { return static_cast<int32_t>(state >> THREADS_AT & 0xff); }

    void start(int32_t threads) {
        const uint64_t round = round_of(state_.load(std::memory_order_relaxed));
        try {
            // A thread that is born now must not take an earlier round for its first.
            for (; started_ < threads - 1; started_++)
                std::thread([this, round, i = started_ + 1] { work(i, round); }).detach();
        } catch (const std::system_error&) {  // no more to be had
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            state_.store((round + 1) << ROUND_AT | static_cast<uint64_t>(threads) << THREADS_AT |
                             static_cast<uint64_t>(pieces_) << PIECES_AT,
                         std::memory_order_release);
        }
        awake_.notify_all();
    }

    void work(int32_t index, uint64_t seen) {
        auto is_new = [&] { return round_of(state_.load(std::memory_order_acquire)) != seen; };
        for (;;) {
            for (int spin = 0; spin < SPINS && !is_new(); spin++) pause();
            if (!is_new()) {
                std::unique_lock<std::mutex> lock(mutex_);
                awake_.wait(lock, is_new);
            }
            const uint64_t state = state_.load(std::memory_order_acquire);
            seen = round_of(state);
            if (index < threads_of(state))
                while (take_piece()) {
                }
        }
    }

    // Runs the next piece of the round that is on; false where none is left.
    bool take_piece() {
        uint64_t state = state_.load(std::memory_order_acquire);
        do {
            if ((state & PIECE_MASK) >= (state >> PIECES_AT & PIECE_MASK)) return false;
        } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
        const int64_t count = count_, piece = static_cast<int64_t>(state & PIECE_MASK);
        run_(context_, static_cast<int32_t>(count * piece / pieces_), static_cast<int32_t>(count * (piece + 1) / pieces_));
        done_.fetch_add(1, std::memory_order_acq_rel);
        return true;
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
    std::atomic<uint64_t> state_{0};
    std::atomic<int32_t> done_{0};
    int32_t started_ = 0, count_ = 0, pieces_ = 0;
    const void* context_ = nullptr;
    void (*run_)(const void*, int32_t, int32_t) = nullptr;
};
