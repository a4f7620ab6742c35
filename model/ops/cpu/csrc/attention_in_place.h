// Sums of weighted values that are read where they lie in the cache, for a single new token.

#pragma once

#include "attention_chunk.h"

// Positions that are read at a time: what all heads need of them fits into the CPU's caches.
constexpr long KEYS_IN_PLACE = 64;

// Bytes of a token from which on its row is a long run itself. Such rows are read once, vector by vector: reading many
// of them ahead (`CacheRows::touch`) would fill the first-level cache.
constexpr long LONG_ROW = 3072;

// The rows of the values of up to KEYS_IN_PLACE positions. Those that the token does not see are zeros.
template <class Number>
struct VisibleValues {
    const Number* rows[KEYS_IN_PLACE];
    long count;  // a multiple of 16

    // The positions [position, to), of which the token sees [first, end).
    VisibleValues(const CacheRows<Number>& cache, long position, long to, long first, long end, const Number* zeros) {
        count = round_up(to - position, WIDTH);
        for (long i = 0; i < count; i += WIDTH) {
            const Number* found[WIDTH];
            cache.find(position + i, end, zeros, found, i);
            for (long j = 0; j < WIDTH; j++) rows[i + j] = position + i + j < first ? zeros : found[j];
        }
    }
};

// Adds the values of one head, times their weights, to `sums` (rows, D). `weights` has a lane for each DEPTH positions.
template <class Format, int rows, int tiles>
inline void add_values_in_place(
    const VisibleValues<typename Format::Number>& values, long head_offset, long d, const float* weights,
    long weight_stride, float* sums, long D) {
    constexpr long DEPTH = Format::DEPTH;
    Floats totals[rows][tiles];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < tiles; j++) totals[i][j] = load(sums + i * D + d + j * WIDTH);
    const auto* row = values.rows;
    for (long lane = 0; lane < values.count / DEPTH; lane++, row += DEPTH) {
        Floats vectors[tiles];
        Format::template load_values<tiles>(row, head_offset + d, vectors);
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
    const VisibleValues<typename Format::Number>& values, long head_offset, const float* weights, long weight_stride,
    float* sums, long D, long num_rows) {
    constexpr int TILES = HAS_AVX512 ? 4 : 1;
    if constexpr (rows > 1)
        if (num_rows < rows)
            return add_head_in_place<Format, rows - 1>(values, head_offset, weights, weight_stride, sums, D, num_rows);
    long d = 0;
    for (; d + TILES * WIDTH <= D; d += TILES * WIDTH)
        add_values_in_place<Format, rows, TILES>(values, head_offset, d, weights, weight_stride, sums, D);
    for (; d < D; d += WIDTH)
        add_values_in_place<Format, rows, 1>(values, head_offset, d, weights, weight_stride, sums, D);
    if (num_rows > rows)
        add_head_in_place<Format>(
            values, head_offset, weights + rows * weight_stride, weight_stride, sums + rows * D, D, num_rows - rows);
}
