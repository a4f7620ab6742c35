// Sums of weighted values that are read where they lie in the cache, for a single new token.

#pragma once

#include "attention_chunk.h"

// Positions whose keys are packed at a time, for all heads.
constexpr long KEYS_IN_PLACE = 64;

// Finds the rows of the values of the WIDTH positions from `position` on. Those outside of [first, end) are zeros.
template <class Number>
void find_visible(
    const CacheRows<Number>& cache, long position, long first, long end, const Number* zeros,
    const Number* (&rows)[WIDTH]) {
    cache.find(position, end, zeros, rows);
    for (long i = 0; i < std::min<long>(first - position, WIDTH); i++) rows[i] = zeros;
}

// Adds the values of one head of WIDTH positions, times their weights, to `sums` (rows, D). `values` are the positions'
// rows, `weights` have a lane for each DEPTH positions. Meanwhile, the rows of the same head in `ahead` are prefetched.
template <class Format, int rows, int tiles>
inline void add_values_in_place(
    const typename Format::Number* const* values, long head_offset, const Ahead<typename Format::Number>& ahead, long d,
    const float* weights, long weight_stride, float* sums, long D) {
    constexpr long DEPTH = Format::DEPTH, SIZE = sizeof(typename Format::Number);
    Floats totals[rows][tiles];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < tiles; j++) totals[i][j] = load(sums + i * D + d + j * WIDTH);
    UNROLL for (long lane = 0; lane < WIDTH / DEPTH; lane++) {
        Floats vectors[tiles];
        Format::template load_values<tiles>(values + lane * DEPTH, head_offset + d, vectors);
        UNROLL for (int i = 0; i < DEPTH; i++)
            UNROLL for (long byte = 0; byte < tiles * WIDTH * SIZE; byte += CACHE_LINE)
                ahead.prefetch(lane * DEPTH + i, d * SIZE + byte);
        UNROLL for (int i = 0; i < rows; i++) {
            const Floats weight = broadcast(weights[i * weight_stride + lane]);
            UNROLL for (int j = 0; j < tiles; j++) totals[i][j] = Format::multiply(totals[i][j], weight, vectors[j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < tiles; j++) store(sums + i * D + d + j * WIDTH, totals[i][j]);
}

constexpr int ROWS_IN_PLACE = 4;

// Likewise for `num_rows` rows and all dims.
template <class Format, int rows = ROWS_IN_PLACE>
void add_head_in_place(
    const typename Format::Number* const* values, long head_offset, const Ahead<typename Format::Number>& ahead,
    const float* weights, long weight_stride, float* sums, long D, long num_rows) {
    constexpr int TILES = HAS_AVX512 ? 4 : 1;
    if constexpr (rows > 1)
        if (num_rows < rows)
            return add_head_in_place<Format, rows - 1>(
                values, head_offset, ahead, weights, weight_stride, sums, D, num_rows);
    long d = 0;
    for (; d + TILES * WIDTH <= D; d += TILES * WIDTH)
        add_values_in_place<Format, rows, TILES>(values, head_offset, ahead, d, weights, weight_stride, sums, D);
    for (; d < D; d += WIDTH)
        add_values_in_place<Format, rows, 1>(values, head_offset, ahead, d, weights, weight_stride, sums, D);
    if (num_rows > rows)
        add_head_in_place<Format>(
            values, head_offset, ahead, weights + rows * weight_stride, weight_stride, sums + rows * D, D,
            num_rows - rows);
}
