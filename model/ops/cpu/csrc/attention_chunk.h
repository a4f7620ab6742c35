// One chunk of the keys and values of some heads, packed as panels (attention_formats.h).
//
// A chunk has the positions [begin, begin + KEYS_PER_CHUNK), with `begin` a multiple of KEYS_PER_CHUNK. The keys of a
// head become [position / 16][lane][16], its values [dim / 16][position / DEPTH][16]. Positions that nobody sees are
// zeros.
//
// The cache is read token by token, all heads of a token at once: memory delivers long runs faster than short ones.

#pragma once

#include <vector>

#include "attention_formats.h"
#include "cache_rows.h"

constexpr long KEYS_PER_CHUNK = 256;

inline long round_down(long number, long multiple) { return number / multiple * multiple; }
inline long round_up(long number, long multiple) { return (number + multiple - 1) / multiple * multiple; }

// Memory that a thread keeps from call to call, aligned to cache lines. Its content is lost when it grows.
struct Scratch {
    std::vector<float> buffer;

    float* reserve(size_t size) {
        if (buffer.size() < size + WIDTH) buffer.assign(std::max(size + WIDTH, 2 * buffer.size()), 0.0f);
        return (float*)(((uintptr_t)buffer.data() + 63) / 64 * 64);
    }
};

template <class Format>
struct PackedChunk {
    using Number = typename Format::Number;
    static constexpr long DEPTH = Format::DEPTH, STEP = Format::KEY_STEP;
    static constexpr long VALUE_STRIDE = KEYS_PER_CHUNK / DEPTH * WIDTH;

    long begin, num_heads, D;
    float* memory;

    // How many floats a head takes. Transposing writes up to 16 lanes at a time, so keys need some room at the end.
    static long keys_size(long D) { return round_up(KEYS_PER_CHUNK * (D / DEPTH) + WIDTH * WIDTH, WIDTH); }
    static long head_size(long D) { return keys_size(D) + D / WIDTH * VALUE_STRIDE; }

    long num_lanes() const { return D / DEPTH; }
    float* key_tile(long head, long position) const {
        return memory + head * head_size(D) + (position - begin) * num_lanes();
    }
    float* value_line(long head, long position) const {
        return memory + head * head_size(D) + keys_size(D) + (position - begin) / DEPTH * WIDTH;
    }

    // Packs the keys of the positions [from, to). `from` is a multiple of STEP.
    void pack_keys(const CacheRows<Number>& cache, long from, long to, const Number* zeros) const {
        const long lanes = num_lanes(), size = D, heads = num_heads, number_size = cache.number_size();
        for (long position = from; position < round_up(to, STEP); position += WIDTH) {
            const Number* rows[WIDTH];
            cache.find(position, to, zeros, rows);
            for (long head = 0; head < heads; head++) {
                float* const tile = key_tile(head, position);
                const Ahead<Number> ahead = cache.ahead(position, head);
                for (long lane = 0; lane < lanes; lane += WIDTH) {
                    Floats vectors[WIDTH];
                    UNROLL for (int i = 0; i < WIDTH; i++) {
                        vectors[i] = Format::load_lanes(rows[i] + head * size + lane * DEPTH, size - lane * DEPTH);
                        ahead.prefetch(i, lane * DEPTH * number_size);
                    }
                    transpose(vectors, tile + lane * WIDTH);
                }
            }
        }
    }

    // Packs the values of the positions [from, to), and zeros before `from`, back to a multiple of STEP.
    void pack_values(const CacheRows<Number>& cache, long from, long to, const Number* zeros) const {
        const long size = D, heads = num_heads;
        for (long position = round_down(from, STEP); position < round_up(to, STEP); position += WIDTH) {
            const Number* rows[WIDTH];
            cache.find(position, to, zeros, rows);
            for (long i = 0; i < from - position && i < WIDTH; i++) rows[i] = zeros;
            for (long head = 0; head < heads; head++)
                for (long i = 0; i < WIDTH; i += DEPTH) {
                    const Number* lane_rows[DEPTH];
                    for (long j = 0; j < DEPTH; j++) lane_rows[j] = rows[i + j] + head * size;
                    float* const line = value_line(head, position + i);
                    long d = 0;
                    for (; d + 2 * WIDTH <= size; d += 2 * WIDTH) pack_values<2>(lane_rows, d, line);
                    for (; d < size; d += WIDTH) pack_values<1>(lane_rows, d, line);
                }
        }
    }

    // Whether all packed values of a head at the positions [from, to) are finite. Both are multiples of STEP.
    bool has_finite_values(long head, long from, long to) const {
        using Packed = typename Format::Weight;  // the packed numbers have the type of the weights
        const float* const lines = value_line(head, from);
        for (long d = 0; d < D; d += WIDTH)
            for (long i = 0; i < (to - from) * WIDTH; i += WIDTH) {
                const Floats value = load((const Packed*)(lines + d / WIDTH * VALUE_STRIDE) + i);
                const Floats difference = value - value;  // NaN for infinity and NaN
                if (count_lanes(is_nan(difference))) return false;
            }
        return true;
    }

   private:
    template <int tiles>
    static void pack_values(const Number* const* rows, long d, float* line) {
        Floats vectors[tiles];
        Format::template load_values<tiles>(rows, d, vectors);
        for (int tile = 0; tile < tiles; tile++) store(line + (d / WIDTH + tile) * VALUE_STRIDE, vectors[tile]);
    }
};
