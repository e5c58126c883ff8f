#include "cpu/thread_pool.hpp"

namespace deepinfer::cpu {
namespace {

constexpr int kSpins = 256;           // pauses before a worker sleeps, about ten microseconds
constexpr int kSpinsBeforeYield = 4096;  // pauses before the caller offers its core to a worker that lost its own

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) {
        workers_.emplace_back([this, thread] { work(thread); });
    }
}

ThreadPool::~ThreadPool() {
    is_ending_.store(true, std::memory_order_release);
    wake_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_shared(int num_tasks, Call call, const void* context) {
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_tasks_.store(num_tasks, std::memory_order_relaxed);
    unfinished_.store(num_tasks, std::memory_order_relaxed);
    const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(number << 32 | static_cast<uint32_t>(num_tasks), std::memory_order_release);
    wake_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
    take_tasks(0);
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spins) {
        pause();
        if (spins > kSpinsBeforeYield) std::this_thread::yield();
    }
}

void ThreadPool::take_tasks(int thread) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(state) != 0) {
        const Call call = call_.load(std::memory_order_relaxed);
        const void* context = context_.load(std::memory_order_relaxed);
        const int32_t num_tasks = num_tasks_.load(std::memory_order_relaxed);
        if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel)) continue;
        call(context, num_tasks - static_cast<int32_t>(static_cast<uint32_t>(state)), thread);
        unfinished_.fetch_sub(1, std::memory_order_release);
        state = state_.load(std::memory_order_acquire);
    }
}

void ThreadPool::work(int thread) {
    while (true) {
        const uint32_t wake = wake_.load(std::memory_order_acquire);
        if (is_ending_.load(std::memory_order_acquire)) return;
        take_tasks(thread);
        for (int spins = 0; spins < kSpins && wake_.load(std::memory_order_relaxed) == wake; ++spins) pause();
        wake_.wait(wake, std::memory_order_acquire);
    }
}

}  // namespace deepinfer::cpu
