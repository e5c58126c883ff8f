// Functions of whole rows around the products: norm, rotation, residual streams, router. Plain loops are IEEE
// operations in the order written (the build forbids contraction), so vectorising them changes no bits.

DI_INLINE V load_any(const void* x, DType dtype, int64_t c, int count) {
    return dtype == DType::kFloat32 ? load_weights_first(static_cast<const float*>(x) + c, count)
                                    : load_weights_first(static_cast<const uint16_t*>(x) + c, count);
}

/// Rounds to `dtype`, stores, and returns what was stored.
DI_INLINE V store_any(void* out, DType dtype, int64_t c, V a, int count) {
    if (dtype == DType::kFloat32) {
        store_first(static_cast<float*>(out) + c, a, count);
        return a;
    }
    a = round_bf16(a);
    store_bf16_first(static_cast<uint16_t*>(out) + c, a, count);
    return a;
}

DI_INLINE int lanes_left(int c, int n) { return n - c < kLanes ? n - c : kLanes; }

void norm_row(const void* x, DType dtype, const float* weight, float eps, int n, void* out) {
    V squares = zero();
    for (int c = 0; c < n; c += kLanes) {
        const V a = load_any(x, dtype, c, lanes_left(c, n));
        squares = fma(a, a, squares);
    }
    const V scale = set1(1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(n) + eps));
    for (int c = 0; c < n; c += kLanes) {
        const int count = lanes_left(c, n);
        const V a = mul(mul(load_any(x, dtype, c, count), scale), load_first(weight + c, count));
        store_any(out, dtype, c, a, count);
    }
}

void rotate_vector(void* x, DType dtype, const float* cos, const float* sin, int pairs) {
    float wide[2 * kMaxPairs];
    const int n = 2 * pairs;
    for (int c = 0; c < n; c += kLanes) {
        const int count = lanes_left(c, n);
        store_first(wide + c, load_any(x, dtype, c, count), count);
    }
    for (int i = 0; i < pairs; ++i) {
        const float even = wide[2 * i], odd = wide[2 * i + 1];
        wide[2 * i] = even * cos[i] - odd * sin[i];
        wide[2 * i + 1] = even * sin[i] + odd * cos[i];
    }
    for (int c = 0; c < n; c += kLanes) {
        const int count = lanes_left(c, n);
        store_any(x, dtype, c, load_first(wide + c, count), count);
    }
}

void advance_row(const StreamsRow& r) {
    V squares[kMaxStreams];
    for (int j = 0; j < r.streams; ++j) squares[j] = zero();
    for (int c = 0; c < r.width; c += kLanes) {
        const int count = lanes_left(c, r.width);
        V streams[kMaxStreams];
        for (int i = 0; i < r.streams; ++i) {
            streams[i] = load_any(r.values, r.dtype, static_cast<int64_t>(i) * r.width + c, count);
        }
        if (r.output != nullptr) {
            const V output = load_any(r.output, r.dtype, c, count);
            V mixed[kMaxStreams];
            for (int j = 0; j < r.streams; ++j) {
                V sum = mul(set1(r.comb[j]), streams[0]);
                for (int i = 1; i < r.streams; ++i) sum = add(sum, mul(set1(r.comb[i * r.streams + j]), streams[i]));
                sum = add(sum, mul(set1(r.post[j]), output));
                mixed[j] = store_any(r.new_values, r.dtype, static_cast<int64_t>(j) * r.width + c, sum, count);
            }
            for (int j = 0; j < r.streams; ++j) streams[j] = mixed[j];
        }
        if (r.collapsed == nullptr) continue;
        V collapsed = mul(set1(r.pre[0]), streams[0]);
        for (int j = 1; j < r.streams; ++j) collapsed = add(collapsed, mul(set1(r.pre[j]), streams[j]));
        store_any(r.collapsed, r.dtype, c, collapsed, count);
        for (int j = 0; j < r.streams; ++j) squares[j] = fma(streams[j], streams[j], squares[j]);
    }
    if (r.mean_square == nullptr) return;
    V total = squares[0];
    for (int j = 1; j < r.streams; ++j) total = add(total, squares[j]);
    *r.mean_square = sum_lanes(total) / static_cast<float>(r.streams * r.width);
}

/// in[i] = 1 / (1 + exp(-in[i])) for n values in memory for a multiple of sixteen.
DI_INLINE void sigmoid_all(float* values, int n) {
    for (int c = 0; c < n; c += kLanes) {
        store(values + c, div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), load(values + c))))));
    }
}

/// Softmax of each row, plus eps; columns, then rows and columns in turn, divided by their sum plus eps.
template <int SIZE>
DI_INLINE void sinkhorn(float* matrix, int dynamic_size, int rounds, float eps) {
    const int m = SIZE > 0 ? SIZE : dynamic_size;
    float exponents[kMaxStreams * kMaxStreams + kLanes] = {};
    for (int i = 0; i < m; ++i) {
        float largest = matrix[i * m];
        for (int j = 1; j < m; ++j) largest = largest > matrix[i * m + j] ? largest : matrix[i * m + j];
        for (int j = 0; j < m; ++j) exponents[i * m + j] = matrix[i * m + j] - largest;
    }
    for (int c = 0; c < m * m; c += kLanes) store(exponents + c, exp(load(exponents + c)));
    for (int i = 0; i < m; ++i) {
        float sum = 0.0f;
        for (int j = 0; j < m; ++j) sum += exponents[i * m + j];
        for (int j = 0; j < m; ++j) matrix[i * m + j] = exponents[i * m + j] / sum + eps;
    }
    for (int round = 0; round < rounds; ++round) {
        if (round > 0) {
            for (int i = 0; i < m; ++i) {
                float sum = matrix[i * m];
                for (int j = 1; j < m; ++j) sum += matrix[i * m + j];
                sum += eps;
                for (int j = 0; j < m; ++j) matrix[i * m + j] /= sum;
            }
        }
        float sums[kMaxStreams];
        for (int j = 0; j < m; ++j) sums[j] = matrix[j];
        for (int i = 1; i < m; ++i) {
            for (int j = 0; j < m; ++j) sums[j] += matrix[i * m + j];
        }
        for (int j = 0; j < m; ++j) sums[j] += eps;
        for (int i = 0; i < m; ++i) {
            for (int j = 0; j < m; ++j) matrix[i * m + j] /= sums[j];
        }
    }
}

void mix_row(const MixRow& r) {
    const int m = r.streams, width = (2 + m) * m;
    const float factor = 1.0f / __builtin_sqrtf(r.mean_square + r.norm_eps);
    float z[(2 + kMaxStreams) * kMaxStreams + kLanes] = {};
    for (int i = 0; i < width; ++i) z[i] = r.projection[i] * factor * r.scale[i] + r.base[i];
    float gates[2 * kMaxStreams + kLanes] = {};
    for (int i = 0; i < 2 * m; ++i) gates[i] = z[i];
    sigmoid_all(gates, 2 * m);
    for (int i = 0; i < m; ++i) {
        r.pre[i] = gates[i] + r.eps;
        r.post[i] = gates[m + i] * 2.0f;
    }
    for (int i = 0; i < m * m; ++i) r.comb[i] = z[2 * m + i];
    if (m == 4) {
        sinkhorn<4>(r.comb, m, r.rounds, r.eps);
    } else {
        sinkhorn<0>(r.comb, m, r.rounds, r.eps);
    }
}

/// ln(1 + t) for t in [0, 1], to about one unit in the last place.
DI_INLINE V log1p_unit(V t) {
    // u = 1 + t lies in [1, 2]; halved above sqrt 2. What rounding took from t comes back as a correction.
    const V one = set1(1.0f), u = add(one, t);
    const V lost = div(sub(t, sub(u, one)), u);
    const V half = round_even(mul(sub(u, set1(0.91421356f)), one));  // 0 up to sqrt 2, 1 above
    const V f = sub(mul(u, sub(one, mul(set1(0.5f), half))), one);   // [-0.293, 0.4143]
    V p = set1(7.0376836292e-2f);
    p = fma(p, f, set1(-1.1514610310e-1f));
    p = fma(p, f, set1(1.1676998740e-1f));
    p = fma(p, f, set1(-1.2420140846e-1f));
    p = fma(p, f, set1(1.4249322787e-1f));
    p = fma(p, f, set1(-1.6668057665e-1f));
    p = fma(p, f, set1(2.0000714765e-1f));
    p = fma(p, f, set1(-2.4999993993e-1f));
    p = fma(p, f, set1(3.3333331174e-1f));
    const V square = mul(f, f);
    const V tail = fma(set1(-0.5f), square, mul(mul(square, f), p));
    return add(fma(half, set1(0.693147181f), add(f, tail)), lost);
}

void route_row(const RouteRow& r) {
    for (int c = 0; c < r.experts; c += kLanes) {
        const int count = lanes_left(c, r.experts);
        const V x = load_first(r.logits + c, count);
        const V softplus = add(max(zero(), x), log1p_unit(exp(sub(zero(), and_bits(x, 0x7fffffffu)))));
        store_first(r.scores + c, sqrt(softplus), count);
    }
    for (int i = 0; i < r.experts; ++i) r.keys[i] = r.scores[i] + r.bias[i];
    float total = 0.0f;
    for (int slot = 0; slot < r.selected; ++slot) {
        int best = -1;
        for (int i = 0; i < r.experts; ++i) {
            // A NaN goes first, as in a descending sort.
            if (r.taken[i]) continue;
            const bool is_nan = r.keys[i] != r.keys[i];
            if (best < 0 || r.keys[i] > r.keys[best] || (is_nan && r.keys[best] == r.keys[best])) best = i;
        }
        r.taken[best] = 1;
        r.ids[slot] = best;
        r.weights[slot] = r.scores[best];
        total += r.scores[best];
    }
    for (int slot = 0; slot < r.selected; ++slot) {
        r.taken[r.ids[slot]] = 0;
        r.weights[slot] = r.weights[slot] / (total + 1e-20f) * r.scale;
    }
}

void gate_row(const GateRow& r) {
    for (int stream = 0; stream < r.streams; ++stream) {
        const int64_t at = static_cast<int64_t>(stream) * r.width;
        V squares = zero(), key_squares = zero(), products = zero();
        for (int c = 0; c < r.width; c += kLanes) {
            const int count = lanes_left(c, r.width);
            const V x = load_any(r.values, r.dtype, at + c, count), key = load_any(r.key_value, r.dtype, at + c, count);
            squares = fma(x, x, squares);
            key_squares = fma(key, key, key_squares);
            products = fma(mul(x, load_first(r.weight + at + c, count)), key, products);
        }
        const float width = static_cast<float>(r.width);
        const float norms = __builtin_sqrtf(sum_lanes(squares) / width + r.eps) *
                            __builtin_sqrtf(sum_lanes(key_squares) / width + r.eps);
        const float dot = sum_lanes(products) / norms * r.scale;
        const float magnitude = dot < 0 ? -dot : dot;
        const float root = __builtin_copysignf(__builtin_sqrtf(magnitude < 1e-6f ? 1e-6f : magnitude), dot);
        const V gate = div(set1(1.0f), add(set1(1.0f), exp(set1(-root))));
        const int64_t value = static_cast<int64_t>(r.streams) * r.width;
        for (int c = 0; c < r.width; c += kLanes) {
            const int count = lanes_left(c, r.width);
            const V gated = mul(gate, load_any(r.key_value, r.dtype, value + c, count));
            store_any(r.out, r.dtype, at + c, add(load_any(r.values, r.dtype, at + c, count), gated), count);
        }
    }
}
