// The threads of one block, as cooperative fibers: each runs until it waits for its warp or its block.
//
// Threads run in ascending order, or descending in a reversed run: where a barrier is missing between them the
// two differ. Threads that wait for each other at different collectives stop the program.
#pragma once
#include <ucontext.h>

#include <functional>
#include <memory>

#include "arithmetic.hpp"

namespace emulator {

inline constexpr int WARP = 32;
inline constexpr int MAX_THREADS = 1024;
inline constexpr int NAMED_BARRIERS = 16;
inline constexpr size_t STACK_BYTES = 1 << 18;

enum class Waiting { NOT, WARP, GROUP, NAMED, PHASE, BLOCK };

// Barriers that copies complete: how often each has been.
struct Phases {
    std::vector<int64_t> completed;
    explicit Phases(int64_t count) : completed(count, 0) {}
    bool is_over(int64_t at, int64_t parity) const { return completed[at] % 2 != parity % 2; }
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool is_done;
    Waiting waiting;
    int group_first, group_count;  // whom it waits for at a GROUP
    int barrier, barrier_count;    // which one NAMED is, and how many threads it joins
    const Phases* phases;          // of a PHASE: the one of that parity at a barrier
    int64_t phase_at, phase_parity;
};

struct Block {
    std::vector<Fiber> fibers;  // kept for the next block: stacks are dear
    int count = 0, current = 0;
    bool has_failed = false;
    ucontext_t scheduler;
    std::function<void()> body;
    uint64_t exchange[MAX_THREADS];
    bool votes[MAX_THREADS];
    int arrived[NAMED_BARRIERS];  // threads that came to a named barrier and went on
};
inline Block block;

inline int thread() { return block.current; }
inline int lane() { return block.current % WARP; }
inline int warp() { return block.current / WARP; }

inline void fiber_main() {
    try {
        block.body();
    } catch (Failure&) {
        block.has_failed = true;
    }
    block.fibers[block.current].is_done = true;
    swapcontext(&block.fibers[block.current].context, &block.scheduler);
}

inline void wait(Waiting what) {
    Fiber& self = block.fibers[block.current];
    self.waiting = what;
    swapcontext(&self.context, &block.scheduler);
}

inline void sync_block() { wait(Waiting::BLOCK); }
inline void sync_warp() { wait(Waiting::WARP); }

// Waits for the threads first, ..., first + count - 1, this one among them.
inline void sync_group(int first, int count) {
    Fiber& self = block.fibers[block.current];
    self.group_first = first;
    self.group_count = count;
    wait(Waiting::GROUP);
}

// Waits until `count` threads have come to barrier `number`.
inline void sync_named(int number, int count) {
    Fiber& self = block.fibers[block.current];
    self.barrier = number;
    self.barrier_count = count;
    wait(Waiting::NAMED);
}

// Comes to barrier `number` without waiting there.
inline void arrive_named(int number, int) { ++block.arrived[number]; }

// Waits until the phase of that parity is over.
inline void wait_phase(const Phases& phases, int64_t at, int64_t parity) {
    if (phases.is_over(at, parity)) return;
    Fiber& self = block.fibers[block.current];
    self.phases = &phases;
    self.phase_at = at;
    self.phase_parity = parity;
    wait(Waiting::PHASE);
}

// The thread that carries out what threads from `first` on do together.
inline bool is_leader(int first = 0) {
    for (int k = first; k < block.count; ++k) {
        if (!block.fibers[k].is_done) return k == block.current;
    }
    return false;
}

// Lets a group of threads on if all of them wait for it.
inline bool release_group(int first, int count) {
    for (int k = first; k < first + count; ++k) {
        const Fiber& fiber = block.fibers[k];
        const bool is_here =
            fiber.waiting == Waiting::GROUP && fiber.group_first == first && fiber.group_count == count;
        if (!fiber.is_done && !is_here) return false;
    }
    for (int k = first; k < first + count; ++k) block.fibers[k].waiting = Waiting::NOT;
    return true;
}

// Lets the threads at a barrier on if enough have come.
inline bool release_named(int number, int count) {
    int here = 0;
    for (int k = 0; k < block.count; ++k) {
        const Fiber& fiber = block.fibers[k];
        here += !fiber.is_done && fiber.waiting == Waiting::NAMED && fiber.barrier == number;
    }
    if (here + block.arrived[number] != count) return false;
    block.arrived[number] = 0;
    for (int k = 0; k < block.count; ++k) {
        Fiber& fiber = block.fibers[k];
        if (fiber.waiting == Waiting::NAMED && fiber.barrier == number) fiber.waiting = Waiting::NOT;
    }
    return true;
}

// Lets threads on whose whole group waits for the same thing; false when nobody can go on.
inline bool release() {
    bool any = false;
    int alive = 0, at_block = 0;
    for (int first = 0; first < block.count; first += WARP) {
        const int last = std::min(block.count, first + WARP);
        int in_warp = 0, at_warp = 0;
        for (int k = first; k < last; ++k) {
            const Fiber& fiber = block.fibers[k];
            in_warp += !fiber.is_done;
            at_warp += !fiber.is_done && fiber.waiting == Waiting::WARP;
            at_block += !fiber.is_done && fiber.waiting == Waiting::BLOCK;
        }
        alive += in_warp;
        if (in_warp > 0 && in_warp == at_warp) {
            any = true;
            for (int k = first; k < last; ++k) block.fibers[k].waiting = Waiting::NOT;
        }
    }
    for (int k = 0; k < block.count; ++k) {
        const Fiber& fiber = block.fibers[k];
        if (!fiber.is_done && fiber.waiting == Waiting::GROUP) {
            any |= release_group(fiber.group_first, fiber.group_count);
        } else if (!fiber.is_done && fiber.waiting == Waiting::NAMED) {
            any |= release_named(fiber.barrier, fiber.barrier_count);
        } else if (!fiber.is_done && fiber.waiting == Waiting::PHASE) {
            if (!fiber.phases->is_over(fiber.phase_at, fiber.phase_parity)) continue;
            any = true;
            block.fibers[k].waiting = Waiting::NOT;
        }
    }
    if (!any && alive > 0 && at_block == alive) {
        any = true;
        for (int k = 0; k < block.count; ++k) block.fibers[k].waiting = Waiting::NOT;
    }
    return any || alive == 0;
}

// Run one block of `count` threads to the end.
inline void run_block(int count, std::function<void()> body) {
    block.body = std::move(body);
    block.count = count;
    std::fill(block.arrived, block.arrived + NAMED_BARRIERS, 0);
    block.has_failed = false;
    if (int(block.fibers.size()) < count) block.fibers.resize(count);
    for (int k = 0; k < count; ++k) {
        Fiber& fiber = block.fibers[k];
        if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
        fiber.is_done = false;
        fiber.waiting = Waiting::NOT;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = &block.scheduler;
        makecontext(&fiber.context, fiber_main, 0);
    }
    for (bool is_alive = true; is_alive;) {
        is_alive = false;
        for (int k = 0; k < count; ++k) {
            const int turn = run.reverse ? count - 1 - k : k;
            Fiber& fiber = block.fibers[turn];
            if (fiber.is_done || fiber.waiting != Waiting::NOT) continue;
            block.current = turn;
            swapcontext(&block.scheduler, &fiber.context);
            if (block.has_failed) throw Failure();
        }
        for (int k = 0; k < count; ++k) is_alive |= !block.fibers[k].is_done;
        if (is_alive && !release()) fail("threads diverged around a collective");
    }
}

template <class T>
inline T shuffle(T value, int source) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    block.exchange[block.current] = bits;
    sync_warp();
    bits = block.exchange[std::min(warp() * WARP + source, block.count - 1)];
    sync_warp();
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Lanes of a group of `width`; a source outside the group is the lane itself.
inline int lane_at(int source, int width) {
    const int first = lane() / width * width;
    return source < first || source >= first + width ? lane() : source;
}
template <class T>
inline T shuffle_from(T value, int source, int width) {
    return shuffle(value, lane() / width * width + (source & (width - 1)));
}
template <class T>
inline T shuffle_xor(T value, int mask, int width) {
    return shuffle(value, lane_at(lane() ^ mask, width));
}
template <class T>
inline T shuffle_down(T value, int by, int width) {
    return shuffle(value, lane_at(lane() + by, width));
}
template <class T>
inline T shuffle_up(T value, int by, int width) {
    return shuffle(value, lane_at(lane() - by, width));
}

template <class T, class Combine>
inline T reduce_warp(T value, Combine combine) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value = combine(value, shuffle(value, lane() ^ mask));
    return value;
}

inline uint64_t ballot(bool vote) {
    block.votes[block.current] = vote;
    sync_warp();
    uint64_t bits = 0;
    for (int k = 0; k < WARP && warp() * WARP + k < block.count; ++k) {
        const int other = warp() * WARP + k;
        if (!block.fibers[other].is_done && block.votes[other]) bits |= uint64_t(1) << k;
    }
    sync_warp();
    return bits;
}
inline uint64_t active_lanes() { return ballot(true); }
inline bool any_lane(bool vote) { return ballot(vote) != 0; }
inline bool all_lanes(bool vote) { return ballot(!vote) == 0; }

inline int count_votes(bool vote) {
    block.votes[block.current] = vote;
    sync_block();
    int votes = 0;
    for (int k = 0; k < block.count; ++k) votes += !block.fibers[k].is_done && block.votes[k];
    sync_block();
    return votes;
}
inline bool any_thread(bool vote) { return count_votes(vote) != 0; }
inline bool all_threads(bool vote) { return count_votes(!vote) == 0; }

}  // namespace emulator
