/// A few persistent threads that share the tasks of one call after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace deepinfer::cpu {

/// `run` hands tasks to the calling thread and the workers, each task once, in no fixed order. Workers look for
/// work a few microseconds after a call, then sleep. One call at a time; the owner sees to that.
class ThreadPool {
public:
    /// `num_threads` counts the calling thread: 1 starts none.
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    /// Calls `task(index, thread)` for index 0 ... num_tasks - 1 and returns when all have ended. `thread` is
    /// below num_threads() and belongs to one task at a time. A task must not throw.
    template <class Task>
    void run(int num_tasks, const Task& task) {
        if (num_tasks <= 1 || workers_.empty()) {
            for (int i = 0; i < num_tasks; ++i) task(i, 0);
            return;
        }
        run_shared(num_tasks, [](const void* context, int i, int thread) {
            (*static_cast<const Task*>(context))(i, thread);
        }, &task);
    }

private:
    using Call = void (*)(const void* context, int index, int thread);

    void run_shared(int num_tasks, Call call, const void* context);
    void take_tasks(int thread);
    void work(int thread);
    bool has_tasks() const { return static_cast<uint32_t>(state_.load(std::memory_order_acquire)) != 0; }

    // Number of the call (upper half) and tasks not yet taken (lower half). `call_`, `context_` and `num_tasks_`
    // belong to the call whose number stands here: taking a task with compare-exchange proves that they still do.
    std::atomic<uint64_t> state_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int32_t> num_tasks_{0};
    std::atomic<int32_t> unfinished_{0};
    std::atomic<uint32_t> wake_{0};  // changes when there is work or the pool ends
    std::atomic<bool> is_ending_{false};
    std::vector<std::thread> workers_;
};

}  // namespace deepinfer::cpu
