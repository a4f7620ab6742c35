// Attention of the new tokens of one sequence, in the query heads of one or several key heads.
//
// A row is one new token in one query head. The rows of a key head are ordered by token, then query head. The keys are
// read in chunks (attention_chunk.h); each chunk is packed once for all rows of an item of work. Blocks of rows are
// multiplied by the keys they see, the scores become weights, and the weights are multiplied by the values. For a single
// new token, packing whole chunks would cost more than it saves: keys are packed a few at a time, and values are read
// where they lie. The order of the sums is the same.

#pragma once

#include <iterator>
#include <numeric>

#include "attention_in_place.h"
#include "attention_softmax.h"

template <class Format>
struct HeadsAttention {
    using Number = typename Format::Number;
    static constexpr long DEPTH = Format::DEPTH, STEP = Format::KEY_STEP;
    static constexpr long BLOCK_ROWS = Format::USES_AMX ? 2 * WIDTH : 4 * PANEL_ROWS;
    static constexpr long SCORE_STRIDE = KEYS_PER_CHUNK + WIDTH;  // no power of two, which would crowd the cache's sets

    CacheRows<Number> keys, values;  // from the first key head on
    const Number *q, *zeros;         // q: at the sequence's first new token and the first query head
    Number* z;                       // likewise
    long q_stride, z_stride;         // from token to token
    long start, num_heads, group;    // start: the position of the first new token. num_heads: key heads
    long D, window;                  // group: query heads per key head. window: 0 if there is none
    float scale, cap;                // scores become cap tanh(score / cap), unless cap is 0
    Scratch& scratch;

    long num_lanes() const { return D / DEPTH; }
    long token(long row) const { return row / group; }
    long offset(long head, long row) const { return (head * group + row % group) * D; }  // in a token of q or z

    // The positions that a row sees: [first_visible, end_visible).
    long first_visible(long row) const { return window ? std::max(0L, start + token(row) - window + 1) : 0; }
    long end_visible(long row) const { return start + token(row) + 1; }

    // The rows [begin, end) of all heads, and memory for them: queries (heads, rows, lanes); the sums over all chunks so
    // far, with values (heads, rows, D); of a block of rows the scores (rows, SCORE_STRIDE), and the sums over a chunk
    // with values (rows, D).
    struct Rows {
        long begin, end;
        float *queries, *values, *scores, *chunk_values, *packed;
        RowSums *sums, *chunk_sums;

        long index(long head, long row) const { return head * (end - begin) + row - begin; }
    };

    // A single token is one block, with the rows of all heads.
    bool reads_in_place(long begin, long end) const { return !Format::USES_AMX && end - begin == group; }

    Rows reserve(long begin, long end) const {
        const long num_rows = num_heads * (end - begin);
        const long block = reads_in_place(begin, end) ? std::max(num_rows, BLOCK_ROWS) : BLOCK_ROWS;
        const auto sums_size = [](long rows) { return round_up(rows * sizeof(RowSums) / sizeof(float), WIDTH); };
        const long sizes[] = {
            round_up(num_rows * num_lanes() + WIDTH, WIDTH), num_rows * D, block * SCORE_STRIDE, block * D,
            num_heads * PackedChunk<Format>::head_size(D), sums_size(num_rows), sums_size(block),
        };
        float* parts[std::size(sizes)];
        float* memory = scratch.reserve(std::accumulate(std::begin(sizes), std::end(sizes), 0L));
        for (size_t i = 0; i < std::size(sizes); memory += sizes[i++]) parts[i] = memory;
        return {begin, end, parts[0], parts[1], parts[2], parts[3], parts[4], (RowSums*)parts[5], (RowSums*)parts[6]};
    }

    void copy_queries(const Rows& rows) const {
        for (long head = 0; head < num_heads; head++)
            for (long row = rows.begin; row < rows.end; row++) {
                const Number* const query = q + token(row) * q_stride + offset(head, row);
                for (long lane = 0; lane < num_lanes(); lane += WIDTH)
                    store(
                        rows.queries + rows.index(head, row) * num_lanes() + lane,
                        Format::load_lanes(query + lane * DEPTH, D - lane * DEPTH));
            }
    }

    // The first chunk that a row sees.
    long first_chunk(long row) const { return round_down(first_visible(row), KEYS_PER_CHUNK); }

    // Computes z of the rows [begin, end).
    void attend(long begin, long end) const {
        const Rows rows = reserve(begin, end);
        const long num_rows = num_heads * (end - begin);
        Multiplier<Format> multiply;
        copy_queries(rows);
        std::fill(rows.values, rows.values + num_rows * D, 0.0f);
        std::fill(rows.sums, rows.sums + num_rows, RowSums{});
        const auto add = [&](long head, long row, const RowSums& sums, const float* chunk_values) {
            const long index = rows.index(head, row);
            combine<Format>(rows.sums[index], rows.values + index * D, sums, chunk_values, D);
        };
        for (long chunk = first_chunk(begin); chunk < end_visible(end - 1); chunk += KEYS_PER_CHUNK)
            visit_chunk(rows, chunk, multiply, add);
        for (long head = 0; head < num_heads; head++)
            for (long row = begin; row < end; row++) {
                const long index = rows.index(head, row);
                finish(head, row, rows.sums[index], rows.values + index * D);
            }
    }

    // Passes the sums of the rows [begin, end) over one chunk to `take`.
    template <class Take>
    void attend_chunk(long begin, long end, long chunk, Take take) const {
        const Rows rows = reserve(begin, end);
        Multiplier<Format> multiply;
        copy_queries(rows);
        visit_chunk(rows, chunk, multiply, take);
    }

    // Writes z of a row from its sums over all keys.
    void finish(long head, long row, const RowSums& sums, const float* row_values) const {
        Number* const to = z + token(row) * z_stride + offset(head, row);
        for (long d = 0; d < D; d += WIDTH) store(to + d, load(row_values + d) / broadcast(sums.total));
    }

    // Passes the sums of each row over one chunk to `take`.
    template <class Take>
    void visit_chunk(const Rows& rows, long chunk_begin, Multiplier<Format>& multiply, Take take) const {
        const long from = std::max(chunk_begin, round_down(first_visible(rows.begin), STEP));
        const long to = std::min(chunk_begin + KEYS_PER_CHUNK, end_visible(rows.end - 1));
        if (reads_in_place(rows.begin, rows.end)) return visit_in_place(rows, from, to, multiply, take);
        const PackedChunk<Format> chunk = {chunk_begin, num_heads, D, rows.packed};
        keys.touch(from, to);
        chunk.pack_keys(keys, from, to, zeros);
        values.touch(from, to);
        chunk.pack_values(values, from, to, zeros);
        for (long head = 0; head < num_heads; head++)
            for (long row = rows.begin; row < rows.end; row += BLOCK_ROWS) {
                const long end_row = std::min(row + BLOCK_ROWS, rows.end);
                const long begin = std::max(from, round_down(first_visible(row), STEP));
                const long end = std::min(to, round_up(end_visible(end_row - 1), STEP));
                if (begin < end) visit_block(rows, chunk, head, row, end_row, begin, end, multiply, take);
            }
    }

    // Passes the sums of the rows of a single token over the positions [from, to) of a chunk to `take`.
    template <class Take>
    void visit_in_place(const Rows& rows, long from, long to, Multiplier<Format>& multiply, Take take) const {
        const long first = first_visible(rows.begin), count = round_up(to - from, STEP), num_rows = num_heads * group;
        for (long begin = from; begin < to; begin += KEYS_IN_PLACE)
            multiply_keys(
                rows, begin, std::min(begin + KEYS_IN_PLACE, to), rows.scores + begin - from, multiply);
        if (cap != 0) cap_scores(rows.scores, num_rows, count);
        for (long i = 0; i < num_rows; i++)
            rows.chunk_sums[i] = compute_weights<Format>(
                rows.scores + i * SCORE_STRIDE, first - from, to - from, count, score_factor());
        std::fill(rows.chunk_values, rows.chunk_values + num_rows * D, 0.0f);
        for (long position = from; position < to; position += WIDTH) {
            const Number* visible[WIDTH];
            if (!IS_PREFETCHED<Number> && position % KEYS_IN_PLACE == 0)
                values.touch(position, std::min(position + KEYS_IN_PLACE, to));
            find_visible(values, position, first, to, zeros, visible);
            for (long head = 0; head < num_heads; head++)
                add_head_in_place<Format>(
                    visible, head * D, values.ahead(position, head),
                    rows.scores + head * group * SCORE_STRIDE + (position - from) / DEPTH, SCORE_STRIDE,
                    rows.chunk_values + head * group * D, D, group);
        }
        for (long i = 0; i < num_rows; i++)
            take(i / group, rows.begin + i % group, rows.chunk_sums[i], rows.chunk_values + i * D);
    }

    // Multiplies the queries of all heads by the keys of the positions [begin, end) -> scores (rows, SCORE_STRIDE).
    void multiply_keys(const Rows& rows, long begin, long end, float* scores, Multiplier<Format>& multiply) const {
        const PackedChunk<Format> packed = {begin, num_heads, D, rows.packed};
        if (!IS_PREFETCHED<Number>) keys.touch(begin, end);
        packed.pack_keys(keys, begin, end, zeros);
        for (long head = 0; head < num_heads; head++)
            multiply({rows.queries + head * group * num_lanes(), num_lanes(), packed.key_tile(head, begin),
                      WIDTH * num_lanes(), group, round_up(end - begin, STEP) / WIDTH, num_lanes(),
                      scores + head * group * SCORE_STRIDE, SCORE_STRIDE});
    }

    // Scores times this factor are the exponents of weights.
    float score_factor() const { return (cap != 0 ? 1.0f : scale) * Format::LOG_BASE; }

    // Passes the sums of the rows [row, end_row) over the positions [begin, end) of a chunk to `take`.
    template <class Take>
    void visit_block(
        const Rows& rows, const PackedChunk<Format>& chunk, long head, long row, long end_row, long begin, long end,
        Multiplier<Format>& multiply, Take take) const {
        const long count = round_up(end - begin, STEP), num_rows = end_row - row;
        multiply({rows.queries + rows.index(head, row) * num_lanes(), num_lanes(), chunk.key_tile(head, begin),
                  WIDTH * num_lanes(), num_rows, count / WIDTH, num_lanes(), rows.scores, SCORE_STRIDE});
        if (cap != 0) cap_scores(rows.scores, num_rows, count);
        for (long i = 0; i < num_rows; i++)
            rows.chunk_sums[i] = compute_weights<Format>(
                rows.scores + i * SCORE_STRIDE, first_visible(row + i) - begin, end_visible(row + i) - begin, count,
                score_factor());
        // Weights of 0 hide the values that a row does not see, unless these are infinite or NaN.
        const bool see_all = first_visible(end_row - 1) <= begin && end <= end_visible(row);
        if (see_all || chunk.has_finite_values(head, begin, begin + count))
            multiply_values(rows.scores, chunk, head, num_rows, begin, count, rows.chunk_values, multiply);
        else
            for (long i = 0; i < num_rows; i++)
                multiply_visible_values(
                    rows.scores + i * SCORE_STRIDE, head, begin, std::max(begin, first_visible(row + i)),
                    std::min(end, end_visible(row + i)), rows.chunk_values + i * D, multiply);
        for (long i = 0; i < num_rows; i++) take(head, row + i, rows.chunk_sums[i], rows.chunk_values + i * D);
    }

    // Multiplies the weights of some rows by the values of `count` positions from `begin` on.
    static void multiply_values(
        const float* weights, const PackedChunk<Format>& chunk, long head, long num_rows, long begin, long count,
        float* out, Multiplier<Format>& multiply) {
        multiply({weights, SCORE_STRIDE, chunk.value_line(head, begin), chunk.VALUE_STRIDE, num_rows, chunk.D / WIDTH,
                  count / DEPTH, out, chunk.D});
    }

    // Multiplies the weights of one row, from position `begin` on, by the values of the positions [from, to) alone.
    void multiply_visible_values(
        const float* weights, long head, long begin, long from, long to, float* out,
        Multiplier<Format>& multiply) const {
        std::fill(out, out + D, 0.0f);
        if (from >= to) return;
        static thread_local Scratch scratch;
        const PackedChunk<Format> visible = {
            round_down(from, KEYS_PER_CHUNK), 1, D, scratch.reserve(PackedChunk<Format>::head_size(D))};
        visible.pack_values(values.head(head), from, to, zeros);
        const long first = round_down(from, STEP), skipped = (first - begin) * sizeof(typename Format::Weight);
        multiply_values(
            (const float*)((const char*)weights + skipped), visible, 0, 1, first, round_up(to - first, STEP), out,
            multiply);
    }

    // Replaces the products of queries and keys by capped scores.
    void cap_scores(float* scores, long num_rows, long count) const {
        for (long i = 0; i < num_rows; i++)
            for (float *score = scores + i * SCORE_STRIDE, *end = score + count; score < end; score += WIDTH)
                store(score, softcap(broadcast(scale) * load(score), broadcast(cap)));
    }
};
