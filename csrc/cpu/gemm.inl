// Products and the row functions around them. Part of an `isa_*.cpp`, inside its namespace.

/// M rows times N weights, of which the first `columns` are stored.
template <int M, int N, class W>
DI_INLINE void gemm_block(const float* const* x, const W* const* w, int columns, int k, float* out,
                          int64_t out_stride) {
    const float* rows[M];
    const W* weights[N];
    for (int i = 0; i < M; ++i) rows[i] = x[i];
    for (int j = 0; j < N; ++j) weights[j] = w[j];
    V acc[M][N];
    for (int i = 0; i < M; ++i) {
        for (int j = 0; j < N; ++j) acc[i][j] = zero();
    }
    const int whole = k - k % kLanes;
    for (int c = 0; c < whole; c += kLanes) {
        V xs[M];
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) xs[i] = load(rows[i] + c);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
            const V ws = load_weights(weights[j] + c);
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) acc[i][j] = fma(xs[i], ws, acc[i][j]);
        }
    }
    if (whole < k) {
        for (int i = 0; i < M; ++i) {
            const V xs = load_first(rows[i] + whole, k - whole);
            for (int j = 0; j < N; ++j) {
                acc[i][j] = fma(xs, load_weights_first(weights[j] + whole, k - whole), acc[i][j]);
            }
        }
    }
    float sums[(M * N + 3) / 4 * 4];
#pragma GCC unroll 8
    for (int s = 0; s + 4 <= M * N; s += 4) {
        sum_lanes4(acc[s / N][s % N], acc[(s + 1) / N][(s + 1) % N], acc[(s + 2) / N][(s + 2) % N],
                   acc[(s + 3) / N][(s + 3) % N], sums + s);
    }
    static_assert(M * N % 4 == 0);
    for (int i = 0; i < M; ++i) {
        float* to = out + i * out_stride;
        if (columns >= N) {
            __builtin_memcpy(to, sums + i * N, N * sizeof(float));
        } else {
            for (int j = 0; j < columns; ++j) to[j] = sums[i * N + j];
        }
    }
}

template <int M, int N, class W>
DI_INLINE void gemm_rows(const GemmTile& t, int first, int last) {
    const W* w = static_cast<const W*>(t.w);
    for (int j = 0; j < t.columns; j += N) {
        const W* weights[N];
        for (int i = 0; i < N; ++i) weights[i] = w + (j + i < t.columns ? j + i : t.columns - 1) * t.w_stride;
        for (int i = first; i < last; i += M) {
            gemm_block<M, N, W>(t.x + i, weights, t.columns - j, t.k, t.out + i * t.out_stride + j, t.out_stride);
        }
    }
}

template <class W>
DI_INLINE void gemm_tile(const GemmTile& t) {
    constexpr int kSingle = kGemmColumns < 4 ? 4 : kGemmColumns;  // enough sums in flight for one row
    const int rest = t.rows % kGemmRows, blocked = t.rows - rest;
    if (blocked > 0) gemm_rows<kGemmRows, kGemmColumns, W>(t, 0, blocked);
    if constexpr (kGemmRows > 2) {
        if (rest == 2) gemm_rows<2, kGemmColumns, W>(t, blocked, t.rows);
    }
    if (rest == 1) gemm_rows<1, kSingle, W>(t, blocked, t.rows);
}

void gemm(const GemmTile& t) {
    if (t.w_dtype == DType::kFloat32) {
        gemm_tile<float>(t);
    } else {
        gemm_tile<uint16_t>(t);
    }
}

void prepare_row(const void* x, DType dtype, bool round, int n, float* out) {
    const auto load_some = [&](int c, int count) DI_LAMBDA {
        return dtype == DType::kFloat32 ? load_weights_first(static_cast<const float*>(x) + c, count)
                                        : load_weights_first(static_cast<const uint16_t*>(x) + c, count);
    };
    if (round) {
        for (int c = 0; c + 32 <= n; c += 32) {
            V a = load_some(c, kLanes), b = load_some(c + kLanes, kLanes);
            round_group(a, b);
            store(out + c, a);
            store(out + c + kLanes, b);
        }
        return;
    }
    for (int c = 0; c < n; c += kLanes) {
        const int count = n - c < kLanes ? n - c : kLanes;
        store_first(out + c, load_some(c, count), count);
    }
}

void store_row(const float* x, int n, DType dtype, void* out) {
    for (int c = 0; c < n; c += kLanes) {
        const int count = n - c < kLanes ? n - c : kLanes;
        const V a = load_first(x + c, count);
        if (dtype == DType::kFloat32) {
            store_first(static_cast<float*>(out) + c, a, count);
        } else {
            store_bf16_first(static_cast<uint16_t*>(out) + c, round_bf16(a), count);
        }
    }
}

DI_INLINE V gated(V gate, V up, float weight, float limit, DType dtype) {
    if (dtype == DType::kBFloat16) {
        gate = round_bf16(gate);
        up = round_bf16(up);
    }
    if (limit > 0) {
        gate = min(set1(limit), gate);
        up = min(set1(limit), max(set1(-limit), up));
    }
    const V silu = div(gate, add(set1(1.0f), exp(sub(zero(), gate))));
    const V product = mul(mul(silu, up), set1(weight));
    return dtype == DType::kBFloat16 ? round_bf16(product) : product;
}

void gated_row(const float* gate, const float* up, int n, float weight, float limit, DType dtype, bool round,
               float* out) {
    if (round) {
        for (int c = 0; c + 32 <= n; c += 32) {
            V a = gated(load(gate + c), load(up + c), weight, limit, dtype);
            V b = gated(load(gate + c + kLanes), load(up + c + kLanes), weight, limit, dtype);
            round_group(a, b);
            store(out + c, a);
            store(out + c + kLanes, b);
        }
        return;
    }
    for (int c = 0; c < n; c += kLanes) {
        const int count = n - c < kLanes ? n - c : kLanes;
        store_first(out + c, gated(load_first(gate + c, count), load_first(up + c, count), weight, limit, dtype),
                    count);
    }
}

void add_row(const float* x, int n, DType dtype, float* out) {
    for (int c = 0; c < n; c += kLanes) {
        const int count = n - c < kLanes ? n - c : kLanes;
        V a = load_first(x + c, count);
        if (dtype == DType::kBFloat16) a = round_bf16(a);
        store_first(out + c, add(load_first(out + c, count), a), count);
    }
}
