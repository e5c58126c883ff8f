// Runs every CPU kernel on random inputs at odd sizes, for the sanitizers; prints a digest for each number of
// threads and fails when two differ. usage: run_kernels INSTRUCTION_SET

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cpu/experts.hpp"
#include "cpu/index_scores.hpp"
#include "cpu/linear.hpp"
#include "cpu/row_ops.hpp"
#include "cpu/sparse_attention.hpp"

namespace {

using namespace deepinfer::cpu;

struct Inputs {
    std::mt19937 generator{1};

    std::vector<float> floats(size_t n) {
        std::vector<float> values(n);
        for (float& value : values) value = static_cast<float>(static_cast<int>(generator() % 2001) - 1000) / 500.0f;
        return values;
    }
    std::vector<uint16_t> bfloats(size_t n) {
        std::vector<uint16_t> values(n);
        for (uint16_t& value : values) value = static_cast<uint16_t>(0x3f00 + generator() % 256);
        return values;
    }
    template <class T = int32_t>
    std::vector<T> integers(size_t n, int first, int last) {
        std::vector<T> values(n);
        for (T& value : values) value = static_cast<T>(first + static_cast<int>(generator() % (last - first + 1)));
        return values;
    }
};

class Digest {
public:
    template <class T>
    void add(const std::vector<T>& values) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
        for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash_ = (hash_ ^ bytes[i]) * 1099511628211u;
    }
    uint64_t value() const { return hash_; }

private:
    uint64_t hash_ = 14695981039346656037u;
};

void products(Context& context, Inputs& in, Digest& digest) {
    for (int64_t rows : {1, 2, 5, 97}) {
        for (int64_t k : {32, 130}) {
            const auto x = in.floats(static_cast<size_t>(rows * 2 * k)), w = in.floats(static_cast<size_t>(2 * 37 * k));
            const auto narrow = in.bfloats(static_cast<size_t>(2 * 37 * k));
            std::vector<float> out(static_cast<size_t>(rows * 2 * 37));
            std::vector<uint16_t> short_out(out.size());
            linear(context, {x.data(), DType::kFloat32, 2 * k, k, w.data(), DType::kFloat32, out.data(),
                             DType::kFloat32, rows, 2, 37, k, k == 32});
            digest.add(out);
            linear(context, {x.data(), DType::kFloat32, 2 * k, k, narrow.data(), DType::kBFloat16, short_out.data(),
                             DType::kBFloat16, rows, 2, 37, k, false});
            digest.add(short_out);
        }
    }
    const auto x = in.floats(60 * 40), w = in.floats(4 * 19 * 40);
    const std::vector<int32_t> offsets = {0, 50, 50, 51, 60};
    std::vector<float> out(60 * 19);
    grouped_linear(context, {x.data(), DType::kFloat32, 40, w.data(), DType::kFloat32, out.data(), offsets.data(), 60,
                             4, 19, 40});
    digest.add(out);
}

void experts(Context& context, Inputs& in, Digest& digest) {
    const auto w13 = in.floats(5 * 128 * 64), w2 = in.floats(5 * 64 * 64);
    for (int64_t rows : {1, 70}) {
        const auto x = in.floats(static_cast<size_t>(rows * 64)), weights = in.floats(static_cast<size_t>(rows * 3));
        const auto ids = in.integers(static_cast<size_t>(rows * 3), 0, 4);
        std::vector<float> out(static_cast<size_t>(rows * 64));
        routed_experts(context, {x.data(), DType::kFloat32, 64, ids.data(), weights.data(), w13.data(), w2.data(),
                                 DType::kFloat32, out.data(), rows, 3, 5, 64, 64, 2.5f, rows > 1});
        digest.add(out);
    }
}

void attention(Context& context, Inputs& in, Digest& digest) {
    auto window = in.integers<uint8_t>(200 * kWindowRecordBytes, 0, 119);
    auto entries = in.integers<uint8_t>(200 * kMainRecordBytes, 0, 50);
    for (size_t i = 0; i < 200; ++i) {
        std::fill_n(window.begin() + static_cast<int64_t>(i) * kWindowRecordBytes + 512, 16, uint8_t{120});
    }
    for (int64_t rows : {1, 3, 90}) {
        for (int64_t heads : {1, 6}) {
            const auto q = in.floats(static_cast<size_t>(rows * heads * kKeyWidth));
            const auto sink = in.floats(static_cast<size_t>(heads));
            const auto window_index = in.integers(static_cast<size_t>(rows * 128), -1, 199);
            const auto main_index = in.integers(static_cast<size_t>(rows * 70), -1, 199);
            std::vector<float> out(q.size());
            sparse_attention(context,
                             {q.data(), DType::kFloat32, out.data(), rows, heads,
                              {window.data(), 2, 100, 100 * kWindowRecordBytes, kWindowRecordBytes,
                               RecordKind::kWindow, window_index.data(), 128, 128},
                              {entries.data(), 2, 100, 100 * kMainRecordBytes, kMainRecordBytes, RecordKind::kMain,
                               main_index.data(), 70, 70},
                              sink.data(), 0.04f});
            digest.add(out);
        }
    }
}

void index(Context& context, Inputs& in, Digest& digest) {
    for (int64_t per_block : {24, 64}) {
        const auto codes = in.integers<uint8_t>(static_cast<size_t>(6 * per_block * 64), 0, 255);
        const auto scales = in.integers<uint8_t>(static_cast<size_t>(6 * per_block * 4), 120, 130);
        const std::vector<int32_t> tables = {3, 1, 5, 2, 4, 3};
        const auto row_seq = in.integers(40, 0, 1), visible = in.integers(40, 0, static_cast<int>(3 * per_block));
        const auto q = in.floats(40 * 9 * kIndexWidth), weights = in.floats(40 * 9);
        std::vector<float> out(static_cast<size_t>(40 * 3 * per_block));
        const IndexScoresArgs args = {q.data(), DType::kFloat32, weights.data(), DType::kFloat32, codes.data(),
                               per_block * 64, 64, scales.data(), per_block * 4, 4, 6, per_block, tables.data(), 2, 3,
                               3, row_seq.data(), visible.data(), out.data(), 40, 9, 3 * per_block};
        index_scores(context, args);
        digest.add(out);
        std::vector<int32_t> candidates = in.integers(40 * 3, -1, static_cast<int>(3 * per_block / 8) - 1);
        std::vector<float> chosen(40 * 3 * 8);
        IndexScoresArgs of_candidates = args;
        of_candidates.out = chosen.data();
        candidate_scores(context, of_candidates, candidates.data(), 3, 8);
        digest.add(chosen);
    }
}

void rows(Context& context, Inputs& in, Digest& digest) {
    constexpr int64_t kRows = 70, kWidth = 72, kStreams = 4;
    auto x = in.floats(kRows * 5 * 128);
    const auto weight = in.floats(5 * 128), mixes = in.floats(kRows * 24), angles = in.floats(kRows * 7);
    const auto output = in.floats(kRows * kWidth);
    std::vector<float> out(kRows * 5 * 128), small(kRows, 1.0f), comb(kRows * 16), pre(kRows * 4), post(kRows * 4);
    std::vector<float> collapsed(kRows * kWidth);
    rms_norm(context, {x.data(), DType::kFloat32, kWidth + 1, weight.data(), 1e-6f, out.data(), kRows, kWidth});
    digest.add(out);
    rotate(context, {x.data() + 5, DType::kFloat32, 2 * kWidth, kWidth, kRows, 2, angles.data(), angles.data(), 7});
    digest.add(x);
    mix_coefficients(context, {mixes.data(), small.data(), weight.data(), weight.data(), kRows, kStreams, 20, 1e-6f,
                               0.0f, pre.data(), post.data(), comb.data()});
    digest.add(comb);
    advance_streams(context, {x.data(), DType::kFloat32, kRows, kStreams, kWidth, output.data(), post.data(),
                              comb.data(), out.data(), pre.data(), collapsed.data(), small.data()});
    digest.add(out);
    digest.add(collapsed);
    digest.add(small);
    std::vector<int32_t> ids(kRows * 3);
    route_topk(context, {mixes.data(), weight.data(), nullptr, nullptr, kRows, 24, 3, 1.5f, ids.data(), pre.data()});
    digest.add(ids);
    swiglu(context, {x.data(), DType::kFloat32, 2 * kWidth, nullptr, 2.0f, out.data(), DType::kFloat32, kRows, kWidth});
    digest.add(out);
    gate_streams(context, {x.data(), x.data(), DType::kFloat32, weight.data(), kRows, kStreams, kWidth, 1e-6f, 0.1f,
                           out.data()});
    digest.add(out);
    std::vector<uint8_t> codes(kRows * 128), scales(kRows * 8);
    std::vector<int64_t> places(kRows);
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int64_t>(places.size() - 1 - i);
    for (Encoding encoding : {Encoding::kFp8, Encoding::kFp4, Encoding::kMxfp4}) {
        store_records(context, {x.data(), DType::kFloat32, 128, encoding, codes.data(), 0, 128, scales.data(), 0, 8, 1,
                                kRows, places.data(), kRows, 128});
        digest.add(codes);
        digest.add(scales);
    }
    round_mxfp4(context, {x.data(), DType::kFloat32, out.data(), kRows, 128});
    digest.add(out);
}

uint64_t run(const std::string& instruction_set, int num_threads) {
    Context context(num_threads, instruction_set);
    Inputs in;
    Digest digest;
    products(context, in, digest);
    experts(context, in, digest);
    attention(context, in, digest);
    index(context, in, digest);
    rows(context, in, digest);
    return digest.value();
}

}  // namespace

int main(int argc, char** argv) {
    const std::string instruction_set = argc > 1 ? argv[1] : "auto";
    const uint64_t expected = run(instruction_set, 1);
    for (int num_threads : {2, 4}) {
        const uint64_t digest = run(instruction_set, num_threads);
        std::printf("%s, %d threads: %016llx\n", instruction_set.c_str(), num_threads,
                    static_cast<unsigned long long>(digest));
        if (digest != expected) {
            std::printf("differs from one thread: %016llx\n", static_cast<unsigned long long>(expected));
            return 1;
        }
    }
    return 0;
}
