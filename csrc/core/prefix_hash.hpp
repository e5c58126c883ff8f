/// Hashes of token prefixes. Equal prefixes have equal hashes; whoever finds one compares the tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace deepinfer {

struct PrefixHash {
    uint64_t low = 0, high = 0;

    bool operator==(const PrefixHash&) const = default;

    /// The hash of this prefix with `tokens` behind it, cut to `num_bits` (1 .. 128).
    PrefixHash extend(std::span<const int32_t> tokens, int32_t num_bits = 128) const {
        uint64_t a = low ^ 0x9e3779b97f4a7c15u, b = high ^ 0xc2b2ae3d27d4eb4fu;
        for (const int32_t token : tokens) {
            const uint64_t t = static_cast<uint32_t>(token);
            a = (a ^ t) * 0xff51afd7ed558ccdu;
            a ^= a >> 32;
            b = (b + t) * 0xc4ceb9fe1a85ec53u;
            b ^= b >> 29;
        }
        const uint64_t size = tokens.size();
        PrefixHash next{mix(a + b + size), mix(b ^ (a << 1) ^ (size << 32))};
        if (num_bits < 128) next.high &= num_bits <= 64 ? 0 : (uint64_t{1} << (num_bits - 64)) - 1;
        if (num_bits < 64) next.low &= (uint64_t{1} << num_bits) - 1;
        return next;
    }

    /// The same with bytes, which no tokens are taken for.
    PrefixHash extend(std::string_view bytes) const {
        std::vector<int32_t> words{-1, static_cast<int32_t>(bytes.size())};
        words.resize(2 + (bytes.size() + 3) / 4);
        std::memcpy(words.data() + 2, bytes.data(), bytes.size());
        return extend(words);
    }

private:
    static uint64_t mix(uint64_t x) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    }
};

}  // namespace deepinfer

template <>
struct std::hash<deepinfer::PrefixHash> {
    size_t operator()(const deepinfer::PrefixHash& hash) const { return static_cast<size_t>(hash.low); }
};
