#include "cpu/gumbel.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// The loops below are plain, so the compiler makes a version for each instruction set. Their results steer a
// search only: which version runs changes no token.
#if defined(__x86_64__)
#define DI_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DI_CLONES
#endif

namespace deepinfer::cpu {
namespace {

constexpr int kGroups = 32;           // Philox calls of a block
constexpr int kTokens = 4 * kGroups;  // one call serves four token ids
constexpr int kRounds = 10;
constexpr uint32_t kMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kKeySteps[2] = {0x9E3779B9u, 0xBB67AE85u};

struct Stream {
    uint32_t key[2];
    uint32_t index[2];
    uint32_t domain;
};

/// Words of the token ids 4 * group ... 4 * group + kTokens - 1, in order of the ids.
DI_CLONES void philox_block(const Stream& stream, uint32_t group, uint32_t* words) {
    uint32_t c0[kGroups], c1[kGroups], c2[kGroups], c3[kGroups];
    for (uint32_t i = 0; i < kGroups; ++i) {
        c0[i] = group + i;
        c1[i] = stream.index[0];
        c2[i] = stream.index[1];
        c3[i] = stream.domain;
    }
    uint32_t k0 = stream.key[0], k1 = stream.key[1];
    for (int round = 0; round < kRounds; ++round) {
        for (int i = 0; i < kGroups; ++i) {
            const uint64_t first = static_cast<uint64_t>(c0[i]) * kMultipliers[0];
            const uint64_t second = static_cast<uint64_t>(c2[i]) * kMultipliers[1];
            c0[i] = static_cast<uint32_t>(second >> 32) ^ c1[i] ^ k0;
            c1[i] = static_cast<uint32_t>(second);
            c2[i] = static_cast<uint32_t>(first >> 32) ^ c3[i] ^ k1;
            c3[i] = static_cast<uint32_t>(first);
        }
        k0 += kKeySteps[0];
        k1 += kKeySteps[1];
    }
    for (int i = 0; i < kGroups; ++i) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

/// Upper bounds of score + noise; returns the largest. With u = (word + 1/2) * 2^-32 the noise is at most -ln(u),
/// as -log1p(-u) >= u, and log2(u) is at least its piecewise linear interpolation, which the bits of a float are.
DI_CLONES float bound_block(const float* scores, const uint32_t* words, float* bounds) {
    constexpr float kLn2 = 0.69314718f;
    constexpr float kExponentBias = 127.0f + 31.0f;  // of the float, and of u = (word / 2) * 2^-31
    float largest = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < kTokens; ++i) {
        const float half = static_cast<float>(static_cast<int32_t>(words[i] >> 1));
        int32_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        const float log2_u = static_cast<float>(bits) * 0x1p-23f - kExponentBias;
        bounds[i] = scores[i] - log2_u * kLn2;
        largest = bounds[i] > largest ? bounds[i] : largest;
    }
    return largest;
}

double noise(uint32_t word) {
    if (word < 0x80000000u) return -std::log(-std::log1p(-(word + 0.5) * 0x1p-32));
    return -std::log(-std::log((4294967295.5 - word) * 0x1p-32));
}

int32_t search_row(const GumbelArgs& a, int64_t row) {
    const auto seed = static_cast<uint64_t>(a.seeds[row]), index = static_cast<uint64_t>(a.index[row]);
    const Stream stream{{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
                        {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32)},
                        a.domain};
    const float* scores = a.scores + row * a.row_stride;
    int64_t* tokens = a.tokens + row * a.vocab;
    int64_t* token_words = a.words + row * a.vocab;
    uint32_t words[kTokens];
    float bounds[kTokens], tail[kTokens];
    int32_t count = 0;
    // A token that stays below the best sum so far, by more than rounding can explain, cannot win.
    float floor = -std::numeric_limits<float>::max();
    for (int64_t first = 0; first < a.vocab; first += kTokens) {
        const auto here = static_cast<int>(std::min<int64_t>(kTokens, a.vocab - first));
        const float* block = scores + first;
        if (here < kTokens) {
            std::fill(std::copy(block, block + here, tail), tail + kTokens,
                      -std::numeric_limits<float>::infinity());
            block = tail;
        }
        philox_block(stream, static_cast<uint32_t>(first / 4), words);
        if (!(bound_block(block, words, bounds) >= floor)) continue;
        for (int i = 0; i < here; ++i) {
            if (!(bounds[i] >= floor)) continue;
            tokens[count] = first + i;
            token_words[count++] = words[i];
            const double sum = block[i] + noise(words[i]);
            const double slack = 1e-3 + 1e-6 * std::abs(sum);
            floor = std::max(floor, static_cast<float>(sum - slack));
        }
    }
    return count;
}

}  // namespace

void gumbel_candidates(Context& context, const GumbelArgs& a) {
    const std::lock_guard lock(context.mutex);
    constexpr int64_t kWorkPerToken = 32;  // in multiply-adds of a product
    const int64_t tasks = std::min(wanted_tasks(context, a.rows * a.vocab * kWorkPerToken), a.rows);
    if (tasks == 0) return;
    const int64_t chunk = ceil_div(a.rows, tasks);
    context.pool().run(static_cast<int>(ceil_div(a.rows, chunk)), [&](int task, int) {
        for (int64_t row = task * chunk; row < std::min((task + 1) * chunk, a.rows); ++row) {
            a.counts[row] = search_row(a, row);
        }
    });
}

}  // namespace deepinfer::cpu
