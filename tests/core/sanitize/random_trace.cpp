/// Random traces on the core without Python, to be run under AddressSanitizer and UBSan.
///
///     random_trace [operations per trace]
///
/// Every operation is followed by `check_integrity`; the program fails on the first broken invariant. Buffers
/// have exactly the size that the layout asks for, so a builder that writes too far is seen.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "../../../csrc/core/check.hpp"
#include "../../../csrc/core/engine_core.hpp"

namespace {

using namespace deepinfer;

constexpr int32_t kVocab = 64;

/// One engine under random operations.
class Trace {
public:
    Trace(const CoreConfig& config, uint32_t seed) : config_(config), core_(config), random_(seed) {
        std::vector<int32_t> map(kVocab);
        for (int32_t& id : map) id = below(1000);
        core_.set_compressed_vocab(map, 3);
        const StepTimePoint points[] = {{1, 1, 1.0}, {1, 6, 2.0}, {6, 6, 3.0}, {6, 36, 9.0}};
        const UndraftedTime undrafted[] = {{1, 0.9}, {6, 2.5}};
        core_.set_step_times(points, undrafted);
    }

    void operate() {
        const int32_t choice = below(100);
        if (choice < 12 && live_.size() < 30) {
            add();
        } else if (choice < 15 && !live_.empty()) {
            core_.abort(pick());
        } else if (choice < 19 && !live_.empty()) {
            core_.preempt(pick());
        } else if (choice < 20 && !live_.empty()) {
            const int64_t id = pick();
            const int32_t outputs =
                core_.read(id, [](const Sequence& sequence) { return sequence.num_kept_outputs(); });
            core_.stop(id, below(outputs + 1), FinishReason::kStop);
        } else if (choice < 22 && below(4) == 0) {
            core_.reset_prefix_cache();
        } else if (choice < 21) {
            core_.discard_in_flight();
            plans_.clear();
            arrivals_.clear();
            core_.keep_swaps({});
        } else if (choice < 26) {
            sweep();
        } else if (choice < 60) {
            commit();
        } else {
            schedule();
        }
        core_.check_integrity();
    }

    void finish() {
        while (!plans_.empty() || core_.counts().num_running + core_.counts().num_waiting > 0) {
            if (plans_.empty()) {
                // A prefix from outside may hold what a sequence needs until it is settled.
                for (int i = 0; i < 8 && plans_.empty(); ++i) schedule();
                DI_CHECK(!plans_.empty(), "an idle engine has work that it does not schedule");
            } else {
                commit();
            }
            core_.check_integrity();
        }
        sweep();
        DI_CHECK(core_.counts().num_free_blocks == config_.num_blocks - 1, "blocks are missing");
        DI_CHECK(core_.counts().num_free_slots == config_.num_state_slots - 1, "slots are missing");
    }

    int64_t num_commits() const { return num_commits_; }
    int64_t num_dealt() const { return num_dealt_; }
    int64_t num_swaps() const { return num_swaps_; }
    int64_t num_unsound() const { return num_unsound_; }
    int64_t num_shared() {
        const PrefixCacheStats stats = core_.prefix_cache_stats();
        return std::min({stats.num_hits, stats.num_forks, stats.num_evicted_blocks});
    }

private:
    int32_t below(int32_t bound) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(bound)); }
    int64_t pick() { return live_[static_cast<size_t>(below(static_cast<int32_t>(live_.size())))]; }

    void add() {
        SequenceParams params;
        params.max_tokens = below(4) == 0 ? -1 : 1 + below(40);
        params.min_tokens = below(3);
        params.eos_token_id = 1;
        params.stop_token_ids.assign(static_cast<size_t>(below(2)), 5);
        params.presence = below(3) == 0 ? 0.5f : 0.0f;
        params.repetition = below(3) == 0 ? 1.5f : 1.0f;
        params.bias_tokens.assign(static_cast<size_t>(below(2)), 9);
        params.bias_values.assign(params.bias_tokens.size(), 1.0f);
        if (below(4) == 0) params.allowed_token_ids = {2, 3, 4};
        if (below(4) == 0) params.golden_token_ids = {7, -1, 8};
        params.num_logprobs = below(4) - 1;
        params.num_prompt_logprobs = below(3) - 1;
        params.needs_text = below(2) == 0;
        params.is_ratio = below(3) == 0;
        if (below(4) == 0) params.content_keys = {{0, 1, "key"}};
        std::vector<int32_t> prompt(static_cast<size_t>(1 + below(config_.max_model_len - 1)));
        for (int32_t& id : prompt) id = below(kVocab + 2);  // the last two are image tokens
        if (config_.prefix_caching && !last_prompt_.empty() && below(3) > 0) {  // mostly begins like the last
            const size_t last = last_prompt_.size();
            const size_t shared = below(2) == 0 ? last : std::min(prompt.size(), last);
            prompt.resize(std::max(prompt.size(), shared));
            std::copy_n(last_prompt_.begin(), shared, prompt.begin());
            if (below(2) == 0) prompt.resize(shared);
        }
        last_prompt_ = prompt;
        live_.push_back(core_.add(std::move(params), prompt));
    }

    /// Prefixes from outside for some of those that may be admitted.
    std::vector<int64_t> receive() {
        std::vector<int64_t> publications;
        for (const int64_t id : core_.take_arrivals()) {
            const int32_t length =
                core_.read(id, [](const Sequence& sequence) { return sequence.length(); });
            const int32_t most = (length - 1) / config_.block_size;
            if (most == 0 || below(2) == 0) continue;
            if (core_.find_prefix(id).num_tokens >= most * config_.block_size) continue;
            if (!core_.reserve_prefix(id, (1 + below(most)) * config_.block_size)) continue;
            publications.push_back(core_.publish_prefix());
            core_.check_integrity();
        }
        return publications;
    }

    void settle(const std::vector<int64_t>& publications) {
        for (const int64_t publication : publications) {
            const bool is_sound = below(3) > 0;
            core_.settle_prefix(publication, is_sound);
            core_.check_integrity();
            num_unsound_ += is_sound ? 0 : 1;
        }
    }

    void schedule() {
        if (plans_.size() == (config_.async_scheduling ? 2u : 1u)) commit();
        num_swaps_ += static_cast<int64_t>(core_.take_swaps().first.size());
        core_.admit_swapped();
        std::vector<int64_t> arrivals = receive();
        std::shared_ptr<StepPlan> plan = core_.schedule(std::nullopt);
        num_swaps_ += static_cast<int64_t>(core_.take_swaps().first.size());
        core_.take_ended();
        if (!plan) {
            settle(arrivals);
            return;
        }
        arrivals_.push_back(std::move(arrivals));
        std::vector<std::byte> buffer(static_cast<size_t>(core_.batch_layout(*plan).num_bytes));
        core_.fill_batch(*plan, buffer);
        if (plan->can_redistribute) deal(*plan);
        plans_.push_back(std::move(plan));
    }

    /// Moves rows between sequences, within their limits.
    void deal(StepPlan& plan) {
        std::vector<int32_t> lengths;
        for (const PlanSequence& entry : plan.sequences) lengths.push_back(entry.num_rows);
        for (int i = 0; i < 8; ++i) {
            const size_t giver = static_cast<size_t>(below(plan.num_seqs()));
            const size_t taker = static_cast<size_t>(below(plan.num_seqs()));
            if (plan.sequences[giver].remap < 0 || plan.sequences[taker].remap < 0) continue;
            if (lengths[giver] == 1 || lengths[taker] == plan.sequences[taker].max_rows) continue;
            --lengths[giver];
            ++lengths[taker];
        }
        core_.set_seqlens_q(plan, lengths);
        ++num_dealt_;
    }

    void commit() {
        if (plans_.empty()) return;
        const std::shared_ptr<StepPlan> plan = plans_.front();
        plans_.pop_front();
        settle(arrivals_.front());
        arrivals_.pop_front();
        std::vector<std::byte> buffer(static_cast<size_t>(core_.sampling_layout(*plan).num_bytes));
        core_.fill_sampling(*plan, buffer);
        const size_t rows = static_cast<size_t>(plan->num_outputs);
        const size_t width = static_cast<size_t>(std::max(0, plan->max_num_logprobs));
        std::vector<int32_t> tokens(rows), emitted, top_ids(rows * width, 4);
        std::vector<float> logprobs(rows, -1.0f), top_logprobs(rows * width, -2.0f);
        std::vector<uint8_t> faults(rows, 0);
        for (int32_t& token : tokens) token = below(kVocab);
        for (uint8_t& fault : faults) fault = below(300) == 0 ? 1 : 0;
        for (const PlanSequence& entry : plan->sequences)
            emitted.push_back(1 + below(std::max(1, entry.num_samples)));
        std::vector<int32_t> drafts(plan->sequences.size() * static_cast<size_t>(config_.num_draft_tokens));
        for (int32_t& draft : drafts) draft = below(kVocab + 4) < 4 ? -1 : below(kVocab);
        const int64_t num_idle = int64_t{plan->num_seqs() - plan->num_drafting()} * config_.num_draft_tokens;
        std::fill_n(drafts.begin(), num_idle, -1);
        std::vector<float> confidences(drafts.size());
        for (float& confidence : confidences) confidence = static_cast<float>(below(101)) / 100.0f;
        StepOutcome outcome;
        outcome.tokens = tokens;
        outcome.num_emitted = emitted;
        outcome.logprobs = logprobs;
        outcome.top_ids = top_ids;
        outcome.top_logprobs = top_logprobs;
        outcome.top_width = static_cast<int32_t>(width);
        outcome.faults = faults;
        if (plan->num_drafting() > 0) {
            outcome.drafts = drafts;
            outcome.confidences = confidences;
            outcome.draft_width = config_.num_draft_tokens;
        }
        core_.commit(*plan, outcome);
        if (!plan->is_prefill()) {
            core_.add_step_time(plan->num_seqs(), plan->num_rows, 1 + below(9), plan->num_drafting() > 0,
                                plan->num_rows);
        }
        ++num_commits_;
    }

    void sweep() {
        std::erase_if(live_, [&](int64_t id) {
            const bool is_finished =
                core_.read(id, [](const Sequence& sequence) { return sequence.is_finished(); });
            if (is_finished) core_.release(id);
            return is_finished;
        });
    }

    CoreConfig config_;
    EngineCore core_;
    std::mt19937 random_;
    std::deque<std::shared_ptr<StepPlan>> plans_;
    std::deque<std::vector<int64_t>> arrivals_;  // publications that each of the plans reads
    std::vector<int64_t> live_;
    std::vector<int32_t> last_prompt_;
    int64_t num_commits_ = 0;
    int64_t num_dealt_ = 0;
    int64_t num_swaps_ = 0;
    int64_t num_unsound_ = 0;
};

CoreConfig make_config(bool is_async, int32_t num_drafts, int32_t num_blocks, bool is_other_kind,
                       bool is_caching) {
    CoreConfig config;
    config.max_num_seqs = 6;
    config.max_num_batched_tokens = 48;
    config.max_model_len = 64;
    config.vocab_size = kVocab;
    config.block_size = 8;
    config.num_blocks = num_blocks;
    config.num_state_slots = 8;
    config.max_prefill_tflops = 1e-9;
    config.attention_terms = {{3.0, 1, 0, 16}, {2.0, 2, 0, 9}};
    config.num_draft_tokens = num_drafts;
    config.async_scheduling = is_async;
    config.stop_preempted_request = is_other_kind;
    config.preemption_mode = PreemptionMode::kSwap;
    config.swap_limit_bytes = 60;
    config.block_bytes = 3;
    config.slot_bytes = 10;
    config.draft_score_bytes = 1;
    config.use_draft_budget = !is_other_kind;
    config.max_ngram = 4;
    config.prefix_caching = is_caching;
    config.prefix_state_interval = is_other_kind ? 16 : 0;
    config.prefix_hash_bits = is_other_kind ? 128 : 6;
    config.image_token_begin = kVocab;
    config.image_token_end = kVocab + 2;
    return config;
}

}  // namespace

int main(int argc, char** argv) {
    const int num_operations = argc > 1 ? std::atoi(argv[1]) : 10000;
    int64_t num_commits = 0, num_dealt = 0, num_shared = 0, num_swaps = 0, num_unsound = 0;
    uint32_t seed = 1;
    for (const bool is_async : {false, true}) {
        for (const int32_t num_drafts : {0, 5}) {
            for (const int32_t num_blocks : {9, 40}) {
                for (const bool is_other_kind : {false, true}) {
                    for (const bool is_caching : {false, true}) {
                        Trace trace(make_config(is_async, num_drafts, num_blocks, is_other_kind, is_caching),
                                    seed++);
                        for (int i = 0; i < num_operations; ++i) trace.operate();
                        trace.finish();
                        num_commits += trace.num_commits();
                        num_dealt += trace.num_dealt();
                        num_shared += trace.num_shared();
                        num_swaps += trace.num_swaps();
                        num_unsound += trace.num_unsound();
                    }
                }
            }
        }
    }
    std::printf("32 traces of %d operations, %lld commits: every invariant holds\n", num_operations,
                static_cast<long long>(num_commits));
    return std::min({num_commits, num_dealt, num_shared, num_swaps, num_unsound}) > 0 ? 0 : 1;
}
