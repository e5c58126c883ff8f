// Attention over decoded records and index scores. Part of an `isa_*.cpp`, inside its namespace.

DI_INLINE void decode_window(const uint8_t* record, float* out) {
    bool is_usual = true;  // only numbers, and 2^8 times each scale is one too
    for (int c = 0; c < kKeyWidth; c += 64) is_usual &= !has_e4m3_nan(record + c);
    for (int group = 0; group < kKeyWidth / 32; ++group) is_usual &= record[kKeyWidth + group] < 247;
    for (int group = 0; group < kKeyWidth / 32; ++group) {
        const int c = group * 32;
        const uint8_t code = record[kKeyWidth + group];
        if (is_usual) {
            const V scale = set1(formats::e8m0(static_cast<uint8_t>(code + 8)));
            store(out + c, mul(decode_e4m3_numbers(record + c), scale));
            store(out + c + kLanes, mul(decode_e4m3_numbers(record + c + kLanes), scale));
        } else {
            for (int i = c; i < c + 32; ++i) out[i] = formats::e4m3(record[i]) * formats::e8m0(code);
        }
    }
}

DI_INLINE void decode_main(const uint8_t* record, float* out) {
    for (int group = 0; group < kKeyWidth / 16; ++group) {
        const V scale = set1(formats::e4m3(record[kKeyWidth / 2 + group]));
        store(out + group * 16, mul(decode_e2m1(record + group * 8), scale));
    }
}

void decode_record(const uint8_t* record, RecordKind kind, float* out) {
    if (kind == RecordKind::kWindow) {
        decode_window(record, out);
    } else if (kind == RecordKind::kMain) {
        decode_main(record, out);
    } else {
        __builtin_memcpy(out, record, kKeyWidth * sizeof(float));
    }
}

/// values[h] += weights[h, key] * keys[key], key after key, for HEADS heads and the VECTORS * 16 channels at `c`.
template <int HEADS, int VECTORS>
DI_INLINE void weigh_block(const float* weights, const float* const* keys, int num_keys, int c, float* values) {
    V acc[HEADS][VECTORS];
    for (int h = 0; h < HEADS; ++h) {
        for (int v = 0; v < VECTORS; ++v) acc[h][v] = zero();
    }
    for (int key = 0; key < num_keys; ++key) {
        V channels[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) channels[v] = load(keys[key] + c + v * kLanes);
#pragma GCC unroll 8
        for (int h = 0; h < HEADS; ++h) {
            const V weight = set1(weights[h * kSegmentKeys + key]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) acc[h][v] = fma(weight, channels[v], acc[h][v]);
        }
    }
    for (int h = 0; h < HEADS; ++h) {
        for (int v = 0; v < VECTORS; ++v) store(values + h * kKeyWidth + c + v * kLanes, acc[h][v]);
    }
}

/// Dot products of HEADS heads from `h` on with all keys.
template <int HEADS, int KEYS>
DI_INLINE void logit_rows(const AttentionSegment& s, int h) {
    for (int key = 0; key < s.num_keys; key += KEYS) {
        const float* keys[KEYS];
        for (int i = 0; i < KEYS; ++i) keys[i] = s.keys[key + i < s.num_keys ? key + i : s.num_keys - 1];
        gemm_block<HEADS, KEYS, float>(s.q + h, keys, s.num_keys - key, kKeyWidth,
                                       s.weights + h * kSegmentKeys + key, kSegmentKeys);
    }
}

void attend(const AttentionSegment& s) {
    const int in_blocks = s.heads - s.heads % kLogitHeads;
    for (int h = 0; h < in_blocks; h += kLogitHeads) logit_rows<kLogitHeads, kLogitKeys>(s, h);
    for (int h = in_blocks; h < s.heads; ++h) logit_rows<1, 4>(s, h);
    for (int h = 0; h < s.heads; ++h) {
        float* logits = s.weights + h * kSegmentKeys;
        for (int key = s.num_keys; key < kSegmentKeys; ++key) logits[key] = -__builtin_inff();
        float largest = -__builtin_inff();
        for (int key = 0; key < s.num_keys; ++key) {
            logits[key] *= s.scale;
            largest = largest > logits[key] ? largest : logits[key];
        }
        V total = zero();
        for (int key = 0; key < kSegmentKeys; key += kLanes) {
            const V weight = exp(sub(load(logits + key), set1(largest)));
            store(logits + key, weight);
            total = add(total, weight);
        }
        s.maxima[h] = largest;
        s.sums[h] = sum_lanes(total);
    }
    constexpr int kSingle = kValueVectors < 4 ? 4 : kValueVectors;
    const int rest = s.heads % kValueHeads, blocked = s.heads - rest;
    for (int c = 0; c < kKeyWidth; c += kValueVectors * kLanes) {
        for (int h = 0; h < blocked; h += kValueHeads) {
            weigh_block<kValueHeads, kValueVectors>(s.weights + h * kSegmentKeys, s.keys, s.num_keys, c,
                                                    s.values + h * kKeyWidth);
        }
    }
    for (int h = blocked; h < s.heads; ++h) {
        for (int c = 0; c < kKeyWidth; c += kSingle * kLanes) {
            weigh_block<1, kSingle>(s.weights + h * kSegmentKeys, s.keys, s.num_keys, c, s.values + h * kKeyWidth);
        }
    }
}

void merge(const float* maxima, const float* sums, const float* values, int64_t stride, int num_segments,
           float sink, float* out) {
    float largest = sink;
    for (int s = 0; s < num_segments; ++s) {
        const float maximum = maxima[s * stride];
        largest = largest > maximum ? largest : maximum;
    }
    float total = first_lane(exp(set1(sink - largest)));
    V acc[kKeyWidth / kLanes];
    for (V& a : acc) a = zero();
    for (int s = 0; s < num_segments; ++s) {
        const V factor = exp(set1(maxima[s * stride] - largest));
        total += first_lane(factor) * sums[s * stride];
        const float* from = values + s * stride * kKeyWidth;
        for (int v = 0; v < kKeyWidth / kLanes; ++v) acc[v] = fma(factor, load(from + v * kLanes), acc[v]);
    }
    const V divisor = set1(total);
    for (int v = 0; v < kKeyWidth / kLanes; ++v) store(out + v * kLanes, div(acc[v], divisor));
}

void decode_panel(const uint8_t* codes, int64_t code_stride, const uint8_t* scales, int64_t scale_stride,
                  float* panel) {
    for (int group = 0; group < kIndexWidth / 32; ++group) {
        float factors[kPanelKeys];
        for (int key = 0; key < kPanelKeys; ++key) factors[key] = formats::e8m0(scales[key * scale_stride + group]);
        const V scale = load(factors);
        for (int word = 0; word < 4; ++word) {
            V channels[8];
            decode_e2m1_transposed(codes + group * 16 + word * 4, static_cast<int>(code_stride), channels);
            float* to = panel + (group * 32 + word * 8) * kPanelKeys;
            for (int i = 0; i < 8; ++i) store(to + i * kPanelKeys, mul(channels[i], scale));
        }
    }
}

void score_panel(const float* panel, const float* q, const float* weights, int heads, float* out) {
    V score = zero();
    for (int h = 0; h < heads; h += kIndexHeads) {
        V acc[kIndexHeads];
        for (V& a : acc) a = zero();
        for (int c = 0; c < kIndexWidth; ++c) {
            const V channel = load(panel + c * kPanelKeys);
#pragma GCC unroll 8
            for (int i = 0; i < kIndexHeads; ++i) acc[i] = fma(set1(q[(h + i) * kIndexWidth + c]), channel, acc[i]);
        }
        for (int i = 0; i < kIndexHeads; ++i) score = fma(set1(weights[h + i]), max(zero(), acc[i]), score);
    }
    store(out, score);
}
