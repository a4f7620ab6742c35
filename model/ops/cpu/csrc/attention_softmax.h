// The softmax of attention, chunk by chunk of keys.
//
// In each chunk, weights are relative to the largest score of the chunk: weight = e^(score - maximum). The chunk gives
// the maximum, the sum of its weights (the total), and the sum of its weighted values. Chunks are then combined in their
// order, so the result has the same bits whether one thread computes all of them or several threads share them.

#pragma once

#include "attention_chunk.h"

constexpr float SMALLEST_SCORE = -std::numeric_limits<float>::max();  // finite, so that differences are no NaN
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// The sums of one row over some keys: `values` (D). Scores are multiples of the Format's LOG_BASE.
struct RowSums {
    float maximum = SMALLEST_SCORE, total = 0.0f;
};

inline float first_lane(Floats a) {
    float lanes[WIDTH];
    store(lanes, a);
    return lanes[0];
}

// Replaces the `count` scores of a row by their weights, and those outside of [first, end) by weights of 0. `count` is a
// multiple of 16. Scores are multiplied by `factor` first, which is positive.
template <class Format>
RowSums compute_weights(float* scores, long first, long end, long count, float factor) {
    using Weight = typename Format::Weight;
    std::fill(scores, scores + std::clamp(first, 0L, count), MINUS_INFINITY);
    std::fill(scores + std::clamp(end, 0L, count), scores + count, MINUS_INFINITY);
    Floats maxima = broadcast(MINUS_INFINITY);
    for (long i = 0; i < count; i += WIDTH) maxima = max(maxima, load(scores + i));
    const float maximum = std::max(SMALLEST_SCORE, factor * reduce_max(maxima));
    const Floats shift = broadcast(-maximum), factors = broadcast(factor);
    Floats total = Floats{};
    for (long i = 0; i < count; i += WIDTH) {
        const Floats weight = Format::power(fma(load(scores + i), factors, shift));
        store((Weight*)scores + i, weight);
        total = total + weight;
    }
    return {maximum, reduce_add(total)};
}

// Adds the sums of a chunk, `added` and `values` (D), to those of the chunks before it, `sums` and `to` (D).
template <class Format>
void combine(RowSums& sums, float* to, const RowSums& added, const float* values, long D) {
    const float maximum = std::max(sums.maximum, added.maximum);
    const Floats before = Format::power(broadcast(sums.maximum - maximum));
    const Floats here = Format::power(broadcast(added.maximum - maximum));
    sums.total = first_lane(fma(broadcast(added.total), here, broadcast(sums.total) * before));
    sums.maximum = maximum;
    for (long d = 0; d < D; d += WIDTH) store(to + d, fma(load(values + d), here, load(to + d) * before));
}
