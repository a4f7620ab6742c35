// Attention of the new tokens of one sequence, in the query heads of one key head.
//
// A row is one new token in one query head. Rows are ordered by token, then query head. The keys are read in chunks
// (attention_chunk.h); each chunk is packed once for all rows of a task. Blocks of rows are multiplied by the keys they
// see, the scores become weights, and the weights are multiplied by the values.

#pragma once

#include "attention_softmax.h"

template <class Format>
struct HeadAttention {
    using Number = typename Format::Number;
    static constexpr long DEPTH = Format::DEPTH, STEP = Format::KEY_STEP;
    static constexpr long BLOCK_ROWS = Format::USES_AMX ? 2 * WIDTH : 2 * PANEL_ROWS;
    static constexpr long SCORE_STRIDE = KEYS_PER_CHUNK + WIDTH;  // no power of two, which would crowd the cache's sets

    CacheRows<Number> keys, values;
    const Number *q, *zeros;  // q: at the sequence's first new token and the first query head. zeros: D of them
    Number* z;                // likewise
    long q_stride, z_stride;  // from token to token
    long start, group, D, window;  // start: the position of the first new token. group: query heads per key head
    float scale, cap;              // scores become cap tanh(score / cap), unless cap is 0
    Scratch& scratch;

    long num_lanes() const { return D / DEPTH; }
    long token(long row) const { return row / group; }

    // The positions that a row sees: [first_visible, end_visible).
    long first_visible(long row) const { return window ? std::max(0L, start + token(row) - window + 1) : 0; }
    long end_visible(long row) const { return start + token(row) + 1; }

    // Some rows, and where their queries, sums and scores lie: queries (rows, lanes), values (rows, D), scores (blocks of
    // rows, SCORE_STRIDE), added (blocks of rows, D).
    struct Rows {
        long begin, end;
        float *queries, *values, *scores, *added, *packed;
        RowSums* sums;
    };

    Rows reserve(long begin, long end) const {
        const long rows = end - begin, sums_size = round_up(rows * (sizeof(RowSums) / sizeof(float)), WIDTH);
        const long queries_size = round_up(rows * num_lanes() + WIDTH, WIDTH);
        const long block = BLOCK_ROWS * (SCORE_STRIDE + D);
        float* const memory =
            scratch.reserve(queries_size + sums_size + rows * D + block + PackedChunk<Format>::size(D));
        float* const row_values = memory + queries_size + sums_size;
        float* const scores = row_values + rows * D;
        return {begin, end, memory, row_values, scores, scores + BLOCK_ROWS * SCORE_STRIDE, scores + block,
                (RowSums*)(memory + queries_size)};
    }

    void copy_queries(const Rows& rows) const {
        for (long row = rows.begin; row < rows.end; row++)
            for (long lane = 0; lane < num_lanes(); lane += WIDTH)
                store(
                    rows.queries + (row - rows.begin) * num_lanes() + lane,
                    Format::load_lanes(
                        q + token(row) * q_stride + row % group * D + lane * DEPTH, D - lane * DEPTH));
    }

    // Computes z of the rows [begin, end).
    void attend(long begin, long end) const {
        const Rows rows = reserve(begin, end);
        Multiplier<Format> multiply;
        copy_queries(rows);
        std::fill(rows.values, rows.values + (end - begin) * D, 0.0f);
        std::fill(rows.sums, rows.sums + (end - begin), RowSums{});
        for (long chunk = round_down(first_visible(begin), KEYS_PER_CHUNK); chunk < end_visible(end - 1);
             chunk += KEYS_PER_CHUNK)
            add_chunk(rows, chunk, multiply, [&](long row, const RowSums& added, const float* added_values) {
                const long index = row - begin;
                combine<Format>(rows.sums[index], rows.values + index * D, added, added_values, D);
            });
        for (long row = begin; row < end; row++) finish(row, rows.sums[row - begin], rows.values + (row - begin) * D);
    }

    // Writes z of a row from its sums over all keys.
    void finish(long row, const RowSums& sums, const float* row_values) const {
        Number* const to = z + token(row) * z_stride + row % group * D;
        for (long d = 0; d < D; d += WIDTH) store(to + d, load(row_values + d) / broadcast(sums.total));
    }

    // Passes the sums of the rows over one chunk to `take`.
    template <class Take>
    void add_chunk(const Rows& rows, long chunk_begin, Multiplier<Format>& multiply, Take take) const {
        const PackedChunk<Format> chunk(chunk_begin, D, rows.packed);
        const long from = std::max(chunk_begin, round_down(first_visible(rows.begin), STEP));
        const long to = std::min(chunk_begin + KEYS_PER_CHUNK, end_visible(rows.end - 1));
        chunk.pack_keys(keys, from, to, zeros);
        chunk.pack_values(values, from, to, zeros);
        for (long row = rows.begin; row < rows.end; row += BLOCK_ROWS) {
            const long last = std::min(row + BLOCK_ROWS, rows.end) - 1;
            const long begin = std::max(from, round_down(first_visible(row), STEP));
            const long end = std::min(to, round_up(end_visible(last), STEP));
            if (begin < end) add_block(rows, chunk, row, last + 1, begin, end, multiply, take);
        }
    }

    // Passes the sums of the rows [row, end_row) over the positions [begin, end) of a chunk to `take`.
    template <class Take>
    void add_block(
        const Rows& rows, const PackedChunk<Format>& chunk, long row, long end_row, long begin, long end,
        Multiplier<Format>& multiply, Take take) const {
        const long count = round_up(end - begin, STEP), num_rows = end_row - row;
        multiply({rows.queries + (row - rows.begin) * num_lanes(), num_lanes(), chunk.key_tile(begin),
                  WIDTH * num_lanes(), num_rows, count / WIDTH, num_lanes(), rows.scores, SCORE_STRIDE});
        if (cap != 0) cap_scores(rows.scores, num_rows, count);
        RowSums sums[BLOCK_ROWS];
        for (long i = 0; i < num_rows; i++)
            sums[i] = compute_weights<Format>(
                rows.scores + i * SCORE_STRIDE, first_visible(row + i) - begin, end_visible(row + i) - begin, count,
                (cap != 0 ? 1.0f : scale) * Format::LOG_BASE);
        // Weights of 0 hide what a row does not see, unless it is infinite or NaN.
        const bool see_all = first_visible(end_row - 1) <= begin && end <= end_visible(row);
        if (see_all || chunk.has_finite_values(begin, begin + count)) {
            multiply_values(rows, chunk, 0, num_rows, begin, count, multiply);
        } else {
            for (long i = 0; i < num_rows; i++) multiply_visible(rows, chunk, row, i, begin, end, multiply);
            chunk.pack_values(values, begin, end, zeros);
        }
        for (long i = 0; i < num_rows; i++) take(row + i, sums[i], rows.added + i * D);
    }

    // Multiplies the weights of the rows [first, first + num_rows) of a block by `count` packed values.
    void multiply_values(
        const Rows& rows, const PackedChunk<Format>& chunk, long first, long num_rows, long begin, long count,
        Multiplier<Format>& multiply) const {
        multiply({rows.scores + first * SCORE_STRIDE, SCORE_STRIDE, chunk.value_line(begin), chunk.VALUE_STRIDE,
                  num_rows, D / WIDTH, count / DEPTH, rows.added + first * D, D});
    }

    // Multiplies the weights of row `index` of a block by the values it sees. The others are replaced by zeros.
    void multiply_visible(
        const Rows& rows, const PackedChunk<Format>& chunk, long row, long index, long begin, long end,
        Multiplier<Format>& multiply) const {
        const long from = std::max(begin, first_visible(row + index)), to = std::min(end, end_visible(row + index));
        std::fill(rows.added + index * D, rows.added + (index + 1) * D, 0.0f);
        if (from >= to) return;
        chunk.pack_values(values, from, to, zeros);
        const long first = round_down(from, STEP), offset = (first - begin) * sizeof(typename Format::Weight);
        Rows shifted = rows;
        shifted.scores = (float*)((char*)rows.scores + offset);
        multiply_values(shifted, chunk, index, 1, first, round_up(to - first, STEP), multiply);
    }

    // Replaces the products of queries and keys by capped scores.
    void cap_scores(float* scores, long num_rows, long count) const {
        for (long i = 0; i < num_rows; i++)
            for (float *score = scores + i * SCORE_STRIDE, *end = score + count; score < end; score += WIDTH)
                store(score, softcap(broadcast(scale) * load(score), broadcast(cap)));
    }
};
