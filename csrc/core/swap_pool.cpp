#include "swap_pool.hpp"

#include "check.hpp"

namespace deepinfer {

SwapPool::SwapPool(const CoreConfig& config)
    : mode_(config.preemption_mode),
      limit_bytes_(config.swap_limit_bytes),
      block_bytes_(config.block_bytes),
      slot_bytes_(config.slot_bytes),
      score_bytes_(config.draft_score_bytes) {}

int64_t SwapPool::bytes_of(int64_t num_blocks, int64_t num_scores) const {
    return num_blocks * block_bytes_ + slot_bytes_ + num_scores * score_bytes_;
}

bool SwapPool::accepts(int64_t bytes, double flops) {
    if (!is_enabled()) return false;
    if (mode_ == PreemptionMode::kAuto) {
        if (copy_rate_ <= 0.0 || prefill_flops_ <= 0.0) return false;
        const double swap_seconds = 2.0 * static_cast<double>(bytes) / copy_rate_;
        if (swap_seconds >= flops * prefill_seconds_ / prefill_flops_) return false;
    }
    const bool fits = stats_.held_bytes + bytes <= limit_bytes_;
    stats_.num_refused += fits ? 0 : 1;
    return fits;
}

void SwapPool::add(int64_t bytes) {
    ++stats_.num_out;
    ++stats_.num_held;
    stats_.held_bytes += bytes;
}

void SwapPool::remove(int64_t bytes, bool is_back) {
    DI_CHECK(stats_.num_held > 0 && stats_.held_bytes >= bytes, "held=", stats_.held_bytes, " bytes=", bytes);
    stats_.num_in += is_back ? 1 : 0;
    --stats_.num_held;
    stats_.held_bytes -= bytes;
}

void SwapPool::add_prefill_time(double flops, double ms) {
    if (!(flops > 0.0 && ms > 0.0)) return;
    prefill_flops_ += flops;
    prefill_seconds_ += ms * 1e-3;
}

}  // namespace deepinfer
