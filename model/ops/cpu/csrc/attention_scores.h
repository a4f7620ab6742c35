// The scores, masked scores and pattern of one key head, as a trace shows them. Attention itself never stores them.

#pragma once

#include "attention_heads.h"

template <class Format>
struct HeadScores {
    using Number = typename Format::Number;
    const HeadsAttention<Format>& head;  // a single key head
    long N, S;                           // new tokens, and keys
    Number *scores, *masked, *pattern;  // (group, N, S) each

    // Writes the rows of the tokens [begin, end).
    void write(long begin_token, long end_token) const {
        const long begin = begin_token * head.group, end = end_token * head.group, rows = end - begin;
        const long stride = round_up(S, KEYS_PER_CHUNK) + WIDTH;
        const typename HeadsAttention<Format>::Rows memory = head.reserve(begin, end);
        static thread_local Scratch scratch;
        float* const all = scratch.reserve(rows * stride);
        Multiplier<Format> multiply;
        head.copy_queries(memory);
        for (long chunk_begin = 0; chunk_begin < S; chunk_begin += KEYS_PER_CHUNK) {
            const PackedChunk<Format> chunk = {chunk_begin, 1, head.D, memory.packed};
            const long to = std::min(S, chunk_begin + KEYS_PER_CHUNK), lanes = head.num_lanes();
            chunk.pack_keys(head.keys, chunk_begin, to, head.zeros);
            multiply({memory.queries, lanes, chunk.memory, WIDTH * lanes, rows,
                      round_up(to - chunk_begin, Format::KEY_STEP) / WIDTH, lanes, all + chunk_begin, stride});
        }
        for (long row = begin; row < end; row++) write_row(row, all + (row - begin) * stride);
    }

   private:
    // Writes one row from the products of its query and all keys.
    void write_row(long row, float* products) const {
        const long first = head.first_visible(row), end = head.end_visible(row);
        const long offset = (row % head.group * N + head.token(row)) * S;
        const auto visible = [&](Floats value, long i, float others) {
            return select(
                first_lanes(first - i), broadcast(others),
                select(first_lanes(end - i), value, broadcast(others)));
        };
        for (long i = 0; i < S; i += WIDTH) {
            Floats score = broadcast(head.scale) * load(products + i);
            if (head.cap != 0) score = softcap(score, broadcast(head.cap));
            store(products + i, score);
            put(scores + offset, i, score);
            put(masked + offset, i, visible(score, i, MINUS_INFINITY));
        }
        struct PatternFormat : AccurateWeights {
            using Weight = float;
        };
        const RowSums sums = compute_weights<PatternFormat>(products, first, end, round_up(S, WIDTH), 1.0f);
        for (long i = 0; i < S; i += WIDTH)
            put(pattern + offset, i, visible(load(products + i) / broadcast(sums.total), i, 0.0f));
    }

    void put(Number* to, long i, Floats value) const {
        i + WIDTH <= S ? store(to + i, value) : store(to + i, value, first_lanes(S - i));
    }
};
