#include "sequence.hpp"

#include "check.hpp"

namespace deepinfer {

void TokenHistory::mention(int32_t token) {
    if (index.emplace(token, static_cast<int32_t>(tokens.size())).second) {
        tokens.push_back(token);
        counts.push_back(0);
    }
}

void TokenHistory::append(int32_t token) {
    mention(token);
    ++counts[index.at(token)];
}

void Sequence::append_output(int32_t token) {
    tokens.push_back(token);
    if (history) history->append(token);
}

Sequence& SequencePool::create() {
    auto sequence = std::make_unique<Sequence>();
    sequence->id = next_id_++;
    Sequence& reference = *sequence;
    sequences_.emplace(reference.id, std::move(sequence));
    return reference;
}

Sequence& SequencePool::get(int64_t id) const {
    const auto found = sequences_.find(id);
    if (found == sequences_.end() || found->second->is_released) {
        throw UnknownSequenceError(concat("no sequence has id ", id, " (never added, or released)"));
    }
    return *found->second;
}

void SequencePool::erase(int64_t id) { sequences_.erase(id); }

}  // namespace deepinfer
