#include "step_time.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "check.hpp"

namespace deepinfer {
namespace {

double median_of(std::span<double> values) {
    const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    if (values.size() % 2 == 1) return *middle;
    return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

/// Numbers of sequences that count as about the same: 1, 2 .. 3, 4 .. 7, ...
int32_t order_of(int32_t num_seqs) { return std::bit_width(static_cast<uint32_t>(num_seqs)); }

void require_time(double ms, int32_t num_seqs, int32_t num_tokens) {
    if (!(ms > 0.0) || !std::isfinite(ms)) {
        throw std::invalid_argument(
            concat("a step of ", num_seqs, " sequences and ", num_tokens, " tokens cannot take ", ms, " ms"));
    }
}

}  // namespace

template <int32_t kCapacity>
void RunningMedian<kCapacity>::add(double value) {
    values_[next_] = value;
    next_ = (next_ + 1) % kCapacity;
    size_ = std::min(size_ + 1, kCapacity);
    std::array<double, kCapacity> copy = values_;
    median_ = median_of({copy.data(), static_cast<size_t>(size_)});
}

double StepTime::Row::linear(double at) const {
    if (at <= x.front() || x.size() == 1) return ms.front();
    const auto behind = std::upper_bound(x.begin(), x.end() - 1, at);  // the last segment goes on
    const size_t right = static_cast<size_t>(behind - x.begin());
    const double share = (at - x[right - 1]) / (x[right] - x[right - 1]);
    return ms[right - 1] + share * (ms[right] - ms[right - 1]);
}

double StepTime::Row::next_size(double at) const {
    const auto found = std::lower_bound(x.begin(), x.end(), at);
    return found == x.end() ? linear(at) : ms[static_cast<size_t>(found - x.begin())];
}

double StepTime::Curve::base(int32_t num_tokens) const {
    const double x = num_tokens * scale_;
    if (is_padded_) return low_->next_size(x);
    const double low = low_->linear(x);
    return low_ == high_ ? low : low + weight_ * std::max(0.0, high_->linear(x) - low);
}

double StepTime::Curve::size_of(int32_t num_tokens) const {
    if (!is_padded_) return num_tokens;
    const auto found = std::lower_bound(low_->x.begin(), low_->x.end(), double(num_tokens));
    return found == low_->x.end() ? num_tokens : *found;
}

void StepTime::set_points(std::span<const StepTimePoint> points, std::span<const UndraftedTime> undrafted) {
    std::map<int32_t, std::map<int32_t, double>> table;  // by sequences, then by tokens
    for (const StepTimePoint& point : points) {
        require_time(point.ms, point.num_seqs, point.num_tokens);
        if (point.num_seqs < 0 || point.num_tokens < 1) {
            throw std::invalid_argument(
                concat("no step has ", point.num_seqs, " sequences and ", point.num_tokens, " tokens"));
        }
        if (!table[point.num_seqs].emplace(point.num_tokens, point.ms).second) {
            throw std::invalid_argument(concat("two times are given for ", point.num_seqs, " sequences and ",
                                               point.num_tokens, " tokens"));
        }
    }
    if (table.size() > 1 && table.contains(0)) {
        throw std::invalid_argument(
            "captured sizes (num_seqs 0) and measured rows (num_seqs > 0) do not mix in one curve");
    }
    std::map<int32_t, double> plain;
    for (const UndraftedTime& time : undrafted) {
        require_time(time.ms, time.num_seqs, time.num_seqs);
        if (time.num_seqs < 1 || !plain.emplace(time.num_seqs, time.ms).second) {
            throw std::invalid_argument(
                concat("a time without drafts for ", time.num_seqs, " sequences is wrong or given twice"));
        }
    }
    *this = StepTime();
    is_padded_ = table.contains(0);
    is_single_ = table.size() == 1;
    for (const auto& [num_seqs, times] : table) {
        Row row;
        row.num_seqs = num_seqs;
        for (const auto& [num_tokens, ms] : times) {
            const double x = is_single_ ? num_tokens : double(num_tokens) / num_seqs;
            const double below = rows_.empty() ? 0.0 : rows_.back().linear(x);
            row.x.push_back(x);
            row.ms.push_back(std::max({ms, below, row.ms.empty() ? 0.0 : row.ms.back()}));
        }
        rows_.push_back(std::move(row));
    }
    for (const auto& [num_seqs, ms] : plain) {
        undrafted_.x.push_back(num_seqs);
        undrafted_.ms.push_back(std::max(ms, undrafted_.ms.empty() ? 0.0 : undrafted_.ms.back()));
    }
}

StepTime::Curve StepTime::at(int32_t num_seqs) const {
    DI_CHECK(is_known(), "num_seqs=", num_seqs);
    Curve curve;
    curve.is_padded_ = is_padded_;
    curve.per_token_ = per_token_ms_;
    curve.constant_ = constant_ms(num_seqs);
    curve.scale_ = is_single_ ? 1.0 : 1.0 / num_seqs;
    curve.low_ = curve.high_ = &rows_.front();
    if (is_single_ || num_seqs <= rows_.front().num_seqs) return curve;
    const auto behind = std::upper_bound(rows_.begin(), rows_.end() - 1, num_seqs,
                                         [](int32_t count, const Row& row) { return count < row.num_seqs; });
    curve.high_ = &*behind;
    curve.low_ = &*(behind - 1);
    curve.weight_ = double(num_seqs - curve.low_->num_seqs) / (curve.high_->num_seqs - curve.low_->num_seqs);
    return curve;
}

double StepTime::draft_ms(int32_t num_seqs) const {
    if (undrafted_.x.empty()) return 0.0;
    return std::max(0.0, at(num_seqs).base(num_seqs) - undrafted_.linear(num_seqs));
}

double StepTime::plain_curve_ms(int32_t num_seqs) const {
    return has_undrafted() ? undrafted_.linear(num_seqs) : at(num_seqs).base(num_seqs);
}

double StepTime::undrafted_ms(int32_t num_seqs) const {
    const auto* tail = plain_tail(num_seqs);
    if (tail == nullptr) return at(num_seqs)(num_seqs) - draft_ms(num_seqs);
    const double least = undrafted_.linear(num_seqs);
    return std::max(least + tail->median(), 0.1 * least);
}

/// Of the newest plain steps of about as many sequences, or of any number; null while there are too few.
const RunningMedian<StepTime::kTailSize>* StepTime::plain_tail(int32_t num_seqs) const {
    const auto own = plain_tails_.find(order_of(num_seqs));
    if (own != plain_tails_.end() && own->second.size() >= kMinTail) return &own->second;
    return any_plain_tail_.size() >= kMinTail ? &any_plain_tail_ : nullptr;
}

int32_t StepTime::max_tokens() const {
    return is_padded_ ? static_cast<int32_t>(rows_.front().x.back()) : std::numeric_limits<int32_t>::max();
}

double StepTime::constant_ms(int32_t num_seqs) const {
    const auto own = tails_.find(num_seqs);
    if (own != tails_.end() && own->second.size() >= kMinTail) return std::max(0.0, own->second.median());
    return any_tail_.size() >= kMinTail ? std::max(0.0, any_tail_.median()) * num_seqs : 0.0;
}

void StepTime::add(int32_t num_seqs, int32_t num_tokens, double ms, bool is_drafted) {
    require_time(ms, num_seqs, num_tokens);
    if (num_seqs < 1 || num_tokens < num_seqs) {
        throw std::invalid_argument(
            concat("no step has ", num_seqs, " sequences and ", num_tokens, " tokens"));
    }
    if (!is_known()) return;
    if (!is_drafted && has_undrafted()) {  // drafts that such a step verifies tell of neither curve alone
        if (num_tokens > num_seqs) return;
        const double remainder = ms - undrafted_.linear(num_seqs);
        plain_tails_[order_of(num_seqs)].add(remainder);
        any_plain_tail_.add(remainder);
        return;
    }
    ++num_steps_;
    const Curve curve = at(num_seqs);
    const double size = curve.size_of(num_tokens);
    const double residual = ms - curve.base(num_tokens);
    Group& group = groups_[static_cast<int32_t>(size)];
    group.residuals.add(residual / size);
    group.last_step = num_steps_;
    update_per_token();
    const double remainder = residual - per_token_ms_ * size;
    tails_[num_seqs].add(remainder);
    any_tail_.add(remainder / num_seqs);
}

void StepTime::update_per_token() {
    std::erase_if(groups_, [&](const auto& item) { return item.second.last_step + kWindow < num_steps_; });
    std::vector<double> medians;
    for (const auto& [size, group] : groups_) {
        if (group.residuals.size() >= kMinGroup) medians.push_back(group.residuals.median());
    }
    per_token_ms_ = medians.empty() ? 0.0 : std::max(0.0, median_of(medians));
}

}  // namespace deepinfer
