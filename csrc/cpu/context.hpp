/// What the CPU kernels keep between calls: threads, scratch memory and the chosen instruction set.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/thread_pool.hpp"

namespace deepinfer::cpu {

/// Memory aligned to cache lines that only grows; its contents do not survive growth.
class Buffer {
public:
    template <class T>
    T* reserve(int64_t count) {
        const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kAlignment) / kAlignment * kAlignment;
        if (bytes > bytes_) {
            memory_.reset();
            bytes_ = 0;
            memory_.reset(std::aligned_alloc(kAlignment, bytes));
            if (!memory_) throw std::bad_alloc();
            bytes_ = bytes;
        }
        return static_cast<T*>(memory_.get());
    }

private:
    static constexpr size_t kAlignment = 64;
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> memory_;
    size_t bytes_ = 0;
};

/// One call at a time runs on a context: each driver holds `mutex` for its duration.
class Context {
public:
    Context(int num_threads, std::string_view instruction_set) : kernels_(&select_kernels(instruction_set)) {
        set_num_threads(num_threads);
    }

    void set_num_threads(int num_threads) {
        const std::lock_guard lock(mutex);
        pool_.reset();
        pool_ = std::make_unique<ThreadPool>(num_threads);
        scratch_ = std::vector<Buffer>(static_cast<size_t>(num_threads));
    }

    const Kernels& kernels() const { return *kernels_; }
    ThreadPool& pool() { return *pool_; }
    int num_threads() const { return pool_->num_threads(); }

    /// Gives every thread `count` values of scratch, before tasks start; a task reads its own with `scratch`.
    template <class T>
    void reserve_scratch(int64_t count) {
        for (Buffer& buffer : scratch_) buffer.reserve<T>(count);
    }
    template <class T>
    T* scratch(int thread) {
        return scratch_[static_cast<size_t>(thread)].reserve<T>(0);
    }

    std::mutex mutex;
    Buffer inputs;    // inputs as float32
    Buffer middle;    // what one phase leaves for the next
    Buffer results;   // outputs that another phase reduces

private:
    const Kernels* kernels_;
    std::unique_ptr<ThreadPool> pool_;
    std::vector<Buffer> scratch_;
};

/// How many tasks are worth starting for `work` multiply-adds: at least 2 us of work each, a few for each thread.
inline int64_t wanted_tasks(const Context& context, int64_t work) {
    constexpr int64_t kMinWork = 65536;
    constexpr int64_t kTasksPerThread = 4;
    const int64_t most = context.num_threads() > 1 ? context.num_threads() * kTasksPerThread : 1;
    const int64_t wanted = work / kMinWork;
    return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace deepinfer::cpu
