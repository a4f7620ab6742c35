// Attention of the new tokens of several sequences over keys and values in the blocks of a paged cache.
//
// q and z (N, H, D) hold the new tokens of all sequences one after the other. keys and values (slots, Hkv, D) are the
// cache of one layer. blocks (S, max_blocks) lists the blocks of each of the S sequences in order; a block has
// `block_size` slots. A token at position p sees the keys from max(0, p - window + 1) up to p.
//
// A row is one new token in one query head. A tile has the rows of some consecutive new tokens of one sequence, in all
// query heads of one key head (or of a few), up to TILE_ROWS rows per key head; they read their keys together. A task
// has some of the tiles.
//
// A tile with few rows reads each key and value where it lies in the cache. A tile with many rows packs them first: it
// transposes 16 keys at a time, so that a vector holds 16 keys, and copies the values next to each other. The next tile
// of the same sequence and heads uses these copies again. For the matrix unit, values are always packed.
//
// All sums are in float32 (if the CPU multiplies pairs of bfloat16, the attention weights are rounded to it first), in
// an order that depends on the position of the token alone. So the result has the same bits whether a prompt is
// computed at once, in chunks or token by token, and whatever other sequences are in the batch. Products of q and k are
// summed in 16 lanes, then over the lanes as a tree, in both ways to read the cache. The matrix unit, if there is one,
// has its own order, which is the same for few and for many rows.

#include <limits>
#include <vector>

#include "amx.h"
#include "kernel.h"

namespace {

constexpr long TILE_ROWS = 32;
constexpr long PREFETCH_KEYS = 8;    // how many keys ahead the cache is prefetched
constexpr long MIN_PACKED_ROWS = 4;  // tiles with fewer rows per key head read the cache in place
constexpr long VALUE_ROWS = 4;       // rows that are computed together with packed values
constexpr long KEY_ROWS = HAS_AVX512 ? 8 : 4;  // rows that are computed together with transposed keys
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// The keys or values of one sequence, some heads of them, in the blocks of the cache: `rows[i]` is the row of the token
// at position i.
template <class Number>
struct CacheRows {
    const Number* pool;
    const int64_t* blocks;
    long block_size, stride, width;  // width: how many numbers of a row are read
    const Number* zeros;             // a row of zeros

    const Number* operator[](long index) const {
        return pool + (blocks[index / block_size] * block_size + index % block_size) * stride;
    }

    // Visits the rows [begin, end), and prefetches rows ahead if it `prefetches`.
    template <bool prefetches, class Visit>
    void visit(long begin, long end, Visit visit_row) const {
        while (begin < end) {
            const long next = std::min(end, (begin / block_size + 1) * block_size);
            const Number *row = (*this)[begin], *const following = next < end ? (*this)[next] : row;
            for (; begin < next; begin++, row += stride) {
                if (prefetches) prefetch_ahead(row, following, begin - next);
                visit_row(begin, row);
            }
        }
    }

    // Visits the rows in pairs: an even index and the odd index after it. A row outside of the range is zeros.
    template <bool prefetches, class Visit>
    void visit_pairs(long begin, long end, Visit visit_pair) const {
        if (begin % 2 && begin < end) visit_pair(begin - 1, zeros, (*this)[begin]), begin++;
        while (begin < end) {
            const long next = std::min(end, (begin / block_size + 1) * block_size);
            const Number *row = (*this)[begin], *const following = next < end ? (*this)[next] : row;
            for (; begin + 1 < next; begin += 2, row += 2 * stride) {
                for (long i = 0; prefetches && i < 2; i++)
                    prefetch_ahead(row + i * stride, following, begin + i - next);
                visit_pair(begin, row, row + stride);
            }
            if (begin < next) visit_pair(begin, row, next < end ? following : zeros), begin += 2;
        }
    }

    // The hardware prefetcher finds neither the next block nor, if only a few heads are read, the next row.
    void prefetch_ahead(const Number* row, const Number* following, long from_next) const {
        prefetch(
            from_next + PREFETCH_KEYS < 0 ? row + PREFETCH_KEYS * stride
                                          : following + (from_next + PREFETCH_KEYS) * stride);
    }

    void prefetch(const Number* row) const {
        const char *const from = (const char*)row, *const to = (const char*)(row + width);
        for (const char* line = from; line < to; line += 64) _mm_prefetch(line, _MM_HINT_T0);
    }
};

// Memory that a thread keeps from call to call, aligned to cache lines. Its content is lost when it grows.
struct Scratch {
    std::vector<float> buffer;

    bool fits(size_t size) const { return buffer.size() >= size + WIDTH; }

    float* reserve(size_t size) {
        if (!fits(size)) buffer.assign(std::max(size + WIDTH, 2 * buffer.size()), 0.0f);
        return (float*)(((uintptr_t)buffer.data() + 63) / 64 * 64);
    }
};

// Passes e^(score - max) of `count` scores to `put`, vector by vector, and returns their sum. `count` is a multiple of
// 16; the scores are padded with -inf.
template <class Put>
float exponentials(const float* scores, long count, Put put) {
    Floats maxima = broadcast(MINUS_INFINITY);
    for (long i = 0; i < count; i += WIDTH) maxima = max(maxima, load(scores + i));
    const Floats shift = broadcast(reduce_max(maxima));
    Floats sum = Floats{};
    for (long i = 0; i < count; i += WIDTH) {
        const Floats value = exp(load(scores + i) - shift);
        put(i, value);
        sum = sum + value;
    }
    return reduce_add(sum);
}

// How products are computed. Each 32-bit lane multiplies DEPTH numbers: one float32 number, or a pair of bfloat16
// numbers. In q k, a pair is two adjacent numbers of a head. In weights times values, a pair is an even key and the
// next key. The weights of a row overwrite its scores. Weights and values are multiplied in chunks of CHUNK keys,
// aligned to multiples of CHUNK.
template <class Number>
struct Float32Dot {
    static constexpr long DEPTH = 1, CHUNK = 1;
    using Weight = float;
    static Floats broadcast_weight(const float* weights, long key) { return broadcast(weights[key]); }
    static Floats load_values(const Number* row, const Number*, long d) { return load(row + d); }
    template <bool prefetches, class Visit>
    static void visit(const CacheRows<Number>& values, long begin, long end, Visit visit_values) {
        values.template visit<prefetches>(
            begin, end, [&](long key, const Number* row) { visit_values(key, row, row); });
    }
    static Floats load_lanes(const Number* from, long) { return load(from); }
    static Floats multiply(Floats sum, Floats q, Floats k) { return fma(q, k, sum); }
};

#ifdef __AVX512BF16__
struct BFloat16Dot {
    static constexpr long DEPTH = 2, CHUNK = 2;
    static Floats load_lanes(const BFloat16* from, long num_left) {  // a head may end with half a vector of pairs
        return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(num_left < 2 * WIDTH ? 0xffff : 0xffffffff, from));
    }
    using Weight = BFloat16;
    static Floats broadcast_weight(const float* weights, long key) {
        return _mm512_castsi512_ps(_mm512_set1_epi32(((const int32_t*)weights)[key / 2]));
    }
    static Floats load_values(const BFloat16* even, const BFloat16* odd, long d) {  // interleaves the two rows
        const __m256i low = _mm256_loadu_si256((const __m256i*)(even + d));
        const __m512i both = _mm512_inserti64x4(
            _mm512_castsi256_si512(low), _mm256_loadu_si256((const __m256i*)(odd + d)), 1);
        const __m512i order = _mm512_setr_epi32(
            0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008, 0x190009,
            0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
    }
    template <bool prefetches, class Visit>
    static void visit(const CacheRows<BFloat16>& values, long begin, long end, Visit visit_values) {
        values.visit_pairs<prefetches>(begin, end, visit_values);
    }
    static Floats multiply(Floats sum, Floats q, Floats k) { return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)k); }
};
#else
using BFloat16Dot = Float32Dot<BFloat16>;
#endif

// With the matrix unit: 16 pairs at a time, of which the even and the odd numbers are summed separately.
struct AmxDot : BFloat16Dot {
    static constexpr long CHUNK = 32;
#ifdef HAS_AMX
    // The maximum of the bits of bfloat16 numbers without their signs, which tells whether all of them are finite.
    static Integers max_bits(Integers maxima, Floats pairs) {
        return (Integers)_mm512_max_epu16((__m512i)maxima, (__m512i)(as_bits(pairs) & broadcast_integer(0x7fff7fff)));
    }
    static bool are_finite(Integers maxima) {
        return !_mm512_cmpge_epu16_mask((__m512i)maxima, _mm512_set1_epi16(0x7f80));
    }
#endif
};

// The products of some rows of q, `num_lanes` lanes each, with 16 transposed keys [num_lanes][16]. Lanes that are 16
// apart are summed first, then these 16 sums as a tree: the order in which `score_in_place` sums them.
template <class Dot, int rows, int lane = 0, int step = 1>
[[gnu::always_inline]] inline void multiply_keys(
    const float* q, const float* transposed, long num_lanes, Floats (&sums)[rows]) {
    if constexpr (step == WIDTH) {
        UNROLL for (int row = 0; row < rows; row++) sums[row] = Floats{};
        for (long at = lane; at < num_lanes; at += WIDTH) {
            const Floats k = load(transposed + at * WIDTH);
            UNROLL for (int row = 0; row < rows; row++)
                sums[row] = Dot::multiply(sums[row], broadcast(q[row * num_lanes + at]), k);
        }
    } else {
        Floats others[rows];
        multiply_keys<Dot, rows, lane, 2 * step>(q, transposed, num_lanes, sums);
        multiply_keys<Dot, rows, lane + step, 2 * step>(q, transposed, num_lanes, others);
        UNROLL for (int row = 0; row < rows; row++) sums[row] = sums[row] + others[row];
    }
}

// Copies of the keys or values of one sequence, some heads of them, as tiles with many rows read them. They begin with
// the key `begin`; those before `end` are complete, so that later tiles can use them too.
struct Packed {
    Scratch scratch;
    long begin = 0, end = 0;
    bool is_finite = true;  // whether all copied numbers are finite

    // Memory for the keys before `to`, of which those from `from` on are wanted. From tile to tile, `from` never
    // decreases. If the memory grows, all copies are lost.
    float* reserve(long from, long to, long numbers_per_key) {
        if (from > end) begin = end = from;
        const size_t size = (to - begin + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * numbers_per_key;
        if (!scratch.fits(size)) end = begin;
        return scratch.reserve(size);
    }
};

// The attention of one sequence's new tokens, in the query heads of one or several key heads.
template <class Number, class Dot>
struct SequenceAttention {
    static constexpr bool USES_AMX = std::is_same_v<Dot, AmxDot>;
    CacheRows<Number> keys, values;
    const Number* q;  // at the sequence's first new token and the first query head
    Number* z;        // likewise
    // start: the position of the first new token. num_heads: key heads. group: query heads per key head.
    long start, num_heads, group, q_stride, H, D, window;
    float scale, cap;  // scores become cap tanh(score / cap), unless cap is 0
    Scratch& scratch;
    Packed &transposed_keys, &packed_values;

    // The keys that a token sees: [first_visible, end_visible).
    long first_visible(long token) const { return window ? std::max(0L, start + token - window + 1) : 0; }
    long end_visible(long token) const { return start + token + 1; }

    // The lanes of a row of q or k: its numbers or pairs, padded to whole vectors.
    long num_lanes() const { return (D + Dot::DEPTH * WIDTH - 1) / (Dot::DEPTH * WIDTH) * WIDTH; }

    // One vector of these lanes.
    Floats load_lanes(const Number* row, long lane) const {
        return Dot::load_lanes(row + lane * Dot::DEPTH, D - lane * Dot::DEPTH);
    }

    // The tokens [begin, end) and the keys [first_key, last_key). Rows are ordered by key head, then token, then query
    // head. The scores of a tile are (rows, score_stride), from first_key on.
    struct Tile {
        const SequenceAttention& attention;
        long begin, end, first_key, last_key;
        long head_rows = (end - begin) * attention.group, rows = attention.num_heads * head_rows;
        long score_stride = (last_key - first_key + WIDTH - 1) / WIDTH * WIDTH + WIDTH;

        long row(long token, long key_head) const { return key_head * head_rows + (token - begin) * attention.group; }
        long token(long row) const { return begin + row % head_rows / attention.group; }
        long head(long row) const { return row / head_rows * attention.group + row % attention.group; }
        bool reads_in_place() const { return head_rows < MIN_PACKED_ROWS; }
    };

    // Memory for the scores of a tile, for (rows, D) numbers after them, and then for `more` numbers.
    float* reserve_scores(const Tile& tile, long more) const {
        return scratch.reserve(tile.rows * (tile.score_stride + D) + more);
    }

    // Computes the scores. The (rows, D) numbers after them hold the queries meanwhile.
    void score(const Tile& tile, float* scores) const {
        float* const queries = scores + tile.rows * tile.score_stride;
        for (long row = 0; row < tile.rows; row++)
            for (long lane = 0; lane < num_lanes(); lane += WIDTH)
                store(
                    queries + row * num_lanes() + lane,
                    load_lanes(q + tile.token(row) * q_stride + tile.head(row) * D, lane));
        multiply(tile, queries, scores);
        const long num_keys = tile.last_key - tile.first_key;  // whole vectors of scores have room
        for (long row = 0; cap != 0 && row < tile.rows; row++)
            for (long i = 0; i < num_keys; i += WIDTH) {
                float* const vector = scores + row * tile.score_stride + i;
                store(vector, softcap(load(vector), broadcast(cap)));
            }
    }

    // Computes the products of the queries and keys of a tile, times `scale`.
    void multiply(const Tile& tile, const float* queries, float* scores) const {
#ifdef HAS_AMX
        if constexpr (USES_AMX) return score_by_amx(tile, queries, scores);
#endif
        const SequenceAttention copy = *this;  // a local copy, so that the compiler knows that no store changes it
        tile.reads_in_place() ? copy.score_in_place(tile, queries, scores) : score_packed(tile, queries, scores);
    }

    // Replaces the scores of a row with their exponentials, and with 0 for keys that share a chunk with visible keys
    // but are not visible. Returns the sum of the exponentials.
    template <class Weight>
    float compute_weights(const Tile& tile, long row, float* scores) const {
        const long first = first_visible(tile.token(row)) - tile.first_key;
        const long end = end_visible(tile.token(row)) - tile.first_key;
        const long padded = (end - first + WIDTH - 1) / WIDTH * WIDTH;
        Weight* const weights = (Weight*)scores;
        std::fill(scores + end, scores + first + padded, MINUS_INFINITY);
        const float sum = exponentials(
            scores + first, padded, [&](long i, Floats value) { store(weights + first + i, value); });
        // The matrix unit multiplies all keys of the tile by each row, so the weights of keys that a row does not see
        // must be 0.
        const long chunk = Dot::CHUNK, num_keys = tile.last_key - tile.first_key;
        std::fill(weights + (USES_AMX ? 0 : first / chunk * chunk), weights + first, 0);
        std::fill(weights + end, weights + ((USES_AMX ? num_keys : end) + chunk - 1) / chunk * chunk, 0);
        return sum;
    }

    // Computes z of the tokens [begin, end).
    void attend(long begin, long end) const {
        const long alignment =
            (end - begin) * group < MIN_PACKED_ROWS ? Dot::CHUNK : std::max<long>(WIDTH, Dot::CHUNK);
        const Tile tile = {*this, begin, end, first_visible(begin) / alignment * alignment, start + end};
        float* const scores = reserve_scores(tile, tile.rows);
        float* const totals = scores + tile.rows * (tile.score_stride + D);
        score(tile, scores);
        for (long row = 0; row < tile.rows; row++)
            totals[row] = compute_weights<typename Dot::Weight>(tile, row, scores + row * tile.score_stride);
        float* const sums = scores + tile.rows * tile.score_stride;  // overwrites the queries
#ifdef HAS_AMX
        if constexpr (USES_AMX) add_values_by_amx(tile, scores, sums);
#endif
        if constexpr (!USES_AMX) {
            std::fill(sums, sums + tile.rows * D, 0.0f);
            tile.reads_in_place() ? add_values_in_place(tile, scores, sums) : add_values_packed(tile, scores, sums);
        }
        for (long row = 0; row < tile.rows; row++)
            for (long d = 0; d < D; d += WIDTH)
                store(
                    z + (tile.token(row) * H + tile.head(row)) * D + d,
                    load(sums + row * D + d) / broadcast(totals[row]));
    }

    // Writes what `attend` does not keep, for the tokens [begin, end) and all S keys: the scores, the masked scores and
    // their softmax, each (H, N, S).
    void write_scores(
        long begin, long end, long N, long S, Number* to_scores, Number* to_masked, Number* to_pattern) const {
        const Tile tile = {*this, begin, end, 0, S};
        float* const scores = reserve_scores(tile, 0);
        score(tile, scores);
        for (long row = 0; row < tile.rows; row++) {
            float* const row_scores = scores + row * tile.score_stride;
            const long first = first_visible(tile.token(row)), end_row = end_visible(tile.token(row));
            const long offset = (tile.head(row) * N + tile.token(row)) * S;
            const auto visible = [&](Floats value, long i, float others) {
                return select(
                    first_lanes(first - i), broadcast(others),
                    select(first_lanes(end_row - i), value, broadcast(others)));
            };
            for (long i = 0; i < S; i += WIDTH) {
                const Floats value = load(row_scores + i);
                write(to_scores + offset, i, S, value);
                write(to_masked + offset, i, S, visible(value, i, MINUS_INFINITY));
            }
            const float sum = compute_weights<float>(tile, row, row_scores);
            for (long i = 0; i < S; i += WIDTH)
                write(to_pattern + offset, i, S, visible(load(row_scores + i) / broadcast(sum), i, 0.0f));
        }
    }

    static void write(Number* to, long i, long size, Floats value) {
        i + WIDTH <= size ? store(to + i, value) : store(to + i, value, first_lanes(size - i));
    }

    void score_in_place(const Tile& tile, const float* queries, float* scores) const {
        keys.template visit<true>(tile.first_key, tile.last_key, [&](long key, const Number* k) {
            long num_left = tile.head_rows;  // rows that still use the key head at k
            for (long row = 0; row < tile.rows; row++) {
                Floats products = Floats{};
                for (long lane = 0; lane < num_lanes(); lane += WIDTH)
                    products = Dot::multiply(products, load(queries + row * num_lanes() + lane), load_lanes(k, lane));
                scores[row * tile.score_stride + key - tile.first_key] = scale * reduce_add(products);
                if (--num_left == 0) num_left = tile.head_rows, k += D;
            }
        });
    }

    void add_values_in_place(const Tile& tile, const float* weights, float* sums) const {
        const auto add_pair = [&](long key, const Number* v, const Number* next) {
            for (long token = tile.begin; token < tile.end; token++) {
                const bool sees_key = is_visible(token, key);
                const bool sees_next = Dot::DEPTH > 1 && is_visible(token, key + 1);
                if (!sees_key && !sees_next) continue;
                const Number *v_row = sees_key ? v : values.zeros, *next_row = sees_next ? next : values.zeros;
                for (long key_head = 0; key_head < num_heads; key_head++, v_row += D, next_row += D)
                    for (long row = tile.row(token, key_head), end = row + group; row < end; row++)
                        add(weights + row * tile.score_stride, key - tile.first_key, v_row, next_row, sums + row * D);
            }
        };
        Dot::template visit<true>(values, tile.first_key, tile.last_key, add_pair);
    }

#ifdef HAS_AMX
    void score_by_amx(const Tile& tile, const float* queries, float* scores) const {
        if (tile.reads_in_place()) return score_in_place_by_amx(tile, queries, scores);
        const float* const packed = transpose_keys(tile.first_key, tile.last_key);
        TileConfig config;
        for (long row = 0; row < tile.rows; row += 2 * WIDTH) {
            const long num_rows = std::min(tile.rows - row, 2L * WIDTH);
            config.set_rows(num_rows);
            for (long key = tile.first_key; key < tile.last_key; key += 2 * WIDTH) {
                float* const to = scores + row * tile.score_stride + key - tile.first_key;
                const long tiles = tile.last_key - key > WIDTH ? 2 : 1;
                multiply_block(
                    num_rows, tiles, queries + row * num_lanes(), num_lanes() * 4,
                    packed + (key - transposed_keys.begin) * num_lanes(), LINE_BYTES, num_lanes() * LINE_BYTES,
                    num_lanes() / WIDTH, to, tile.score_stride * 4);
                for (long block_row = 0; block_row < num_rows; block_row++)
                    for (long i = 0; i < tiles * WIDTH; i += WIDTH) {
                        float* const vector = to + block_row * tile.score_stride + i;
                        store(vector, broadcast(scale) * load(vector));
                    }
            }
        }
    }

    // Multiplies 16 keys where they lie by transposed queries. The products are the same, summed in the same order.
    void score_in_place_by_amx(const Tile& tile, const float* queries, float* scores) const {
        const long size = num_lanes() * WIDTH;  // of the queries of one key head, [lane][row]
        static thread_local Scratch scratch;
        float* const transposed = scratch.reserve(num_heads * size + WIDTH * num_lanes());
        float* const copy = transposed + num_heads * size;
        std::fill(transposed, transposed + num_heads * size, 0.0f);
        for (long row = 0; row < tile.rows; row++)
            for (long lane = 0; lane < num_lanes(); lane++)
                transposed[row / tile.head_rows * size + lane * WIDTH + row % tile.head_rows] =
                    queries[row * num_lanes() + lane];
        TileConfig config;
        config.set_rows(WIDTH);
        for (long key = tile.first_key; key < tile.last_key; key += WIDTH) {
            const long count = std::min<long>(tile.last_key - key, WIDTH);
            const Number* rows[WIDTH];
            keys.template visit<false>(key, key + count, [&](long index, const Number* row) {
                rows[index - key] = row;
            });
            keys.template visit<false>(
                std::min(key + WIDTH, tile.last_key), std::min(key + 2 * WIDTH, tile.last_key),
                [&](long, const Number* row) { keys.prefetch(row); });
            const bool are_in_one_block = count == WIDTH && keys.block_size % WIDTH == 0;
            for (long key_head = 0; key_head < num_heads; key_head++) {
                for (long i = 0; i < count && !are_in_one_block; i++)
                    std::memcpy(copy + i * num_lanes(), rows[i] + key_head * D, D * sizeof(Number));
                const void* const x = are_in_one_block ? (const void*)(rows[0] + key_head * D) : copy;
                alignas(LINE_BYTES) float products[WIDTH][WIDTH];
                multiply_tiles<false, 1, false>(
                    x, are_in_one_block ? keys.stride * sizeof(Number) : num_lanes() * 4, transposed + key_head * size,
                    LINE_BYTES, 0, num_lanes() / WIDTH, products, LINE_BYTES, [](long) {});
                for (long row = 0; row < tile.head_rows; row++) {
                    const long score_row = key_head * tile.head_rows + row;
                    float* const to = scores + score_row * tile.score_stride + key - tile.first_key;
                    for (long i = 0; i < count; i++) to[i] = scale * products[i][row];
                }
            }
        }
    }

    void add_values_by_amx(const Tile& tile, const float* weights, float* sums) const {
        TileConfig config;
        const float* const packed = pack_values(tile.first_key, tile.last_key);
        for (long key_head = 0; key_head < num_heads && packed_values.is_finite; key_head++)
            for (long row = key_head * tile.head_rows, end = row + tile.head_rows; row < end; row += 2 * WIDTH)
                add_rows_by_amx(
                    tile, row, std::min(end - row, 2L * WIDTH), packed, tile.last_key, weights, sums, config);
        if (packed_values.is_finite) return;
        // 0 times infinity or NaN is NaN, so each row may only read the values that it sees.
        for (long row = 0; row < tile.rows; row++) {
            const long from = first_visible(tile.token(row)), end = end_visible(tile.token(row));
            packed_values.begin = packed_values.end = from / Dot::CHUNK * Dot::CHUNK;
            add_rows_by_amx(tile, row, 1, pack_values(from, end), end, weights, sums, config);
        }
    }

    void add_rows_by_amx(
        const Tile& tile, long row, long num_rows, const float* packed, long end, const float* weights, float* sums,
        TileConfig& config) const {
        config.set_rows(num_rows);
        const long begin = std::max(packed_values.begin, tile.first_key), width = num_heads * D;
        const long key_head = row / tile.head_rows;
        const float* const w = packed + (begin - packed_values.begin) / Dot::DEPTH * width + key_head * D;
        const auto* const x =
            (const typename Dot::Weight*)(weights + row * tile.score_stride) + begin - tile.first_key;
        for (long d = 0; d < D; d += 2 * WIDTH)
            multiply_block(
                num_rows, 2, x, tile.score_stride * 4, w + d, width * 4, LINE_BYTES,
                (end - begin + Dot::CHUNK - 1) / Dot::CHUNK, sums + row * D + d, D * 4);
    }

    static void multiply_block(
        long num_rows, long tiles, const void* x, long x_stride, const void* w, long w_line, long w_tile, long steps,
        void* to, long to_stride) {
        const auto none = [](long) {};
        if (num_rows > WIDTH)
            tiles == 2 ? multiply_tiles<false, 2, true>(x, x_stride, w, w_line, w_tile, steps, to, to_stride, none)
                       : multiply_tiles<false, 1, true>(x, x_stride, w, w_line, w_tile, steps, to, to_stride, none);
        else
            tiles == 2 ? multiply_tiles<false, 2, false>(x, x_stride, w, w_line, w_tile, steps, to, to_stride, none)
                       : multiply_tiles<false, 1, false>(x, x_stride, w, w_line, w_tile, steps, to, to_stride, none);
    }
#endif

    bool is_visible(long token, long key) const { return key >= first_visible(token) && key < end_visible(token); }

    // Adds the value of a key, or of a pair of keys, times its weight to the sums of one row.
    void add(const float* weights, long key, const Number* v, const Number* next, float* sums) const {
        for (long d = 0; d < D; d += WIDTH) {
            const Floats value = Dot::load_values(v, next, d);
            store(sums + d, Dot::multiply(load(sums + d), Dot::broadcast_weight(weights, key), value));
        }
    }

    void score_packed(const Tile& tile, const float* queries, float* scores) const {
        const float* const packed = transpose_keys(tile.first_key, tile.last_key);
        for (long key = tile.first_key; key < tile.last_key; key += WIDTH) {
            const float* const k = packed + (key - transposed_keys.begin) * num_lanes();
            float* const key_scores = scores + key - tile.first_key;
            long row = 0;
            for (; row + KEY_ROWS <= tile.rows; row += KEY_ROWS)
                score_rows<KEY_ROWS>(tile, queries, key_scores, k, row);
            for (; row < tile.rows; row++) score_rows<1>(tile, queries, key_scores, k, row);
        }
    }

    // Copies keys as [key / 16][lane][key % 16], from a multiple of 16 on.
    const float* transpose_keys(long from, long to) const {
        float* const packed = transposed_keys.reserve(from, to, num_lanes());
        for (long key = transposed_keys.end; key < to; key += WIDTH) {
            const Number* k[WIDTH];
            keys.template visit<false>(key, std::min(key + WIDTH, to), [&](long index, const Number* row) {
                k[index - key] = row;
            });
            for (long i = to - key; i < WIDTH; i++) k[i] = k[i - 1];
            for (long lane = 0; lane < num_lanes(); lane += WIDTH) {
                Floats rows[WIDTH];
                for (long i = 0; i < WIDTH; i++) rows[i] = load_lanes(k[i], lane);
                transpose(rows, packed + (key - transposed_keys.begin) * num_lanes() + lane * WIDTH);
            }
        }
        transposed_keys.end = std::max(transposed_keys.end, to / WIDTH * WIDTH);
        return packed;
    }

    // Copies values as [key / DEPTH][key head][D], pairs interleaved, from a multiple of DEPTH on, padded with zeros to
    // whole chunks.
    const float* pack_values(long from, long to) const {
        const long size = num_heads * D;
        float* const packed = packed_values.reserve(from / Dot::CHUNK * Dot::CHUNK, to, size);
        const long begin = packed_values.begin;
        const auto line = [&](long key) { return packed + (key - begin) / Dot::DEPTH * size; };
        Integers maxima = {};
        if (packed_values.begin == packed_values.end) packed_values.is_finite = true;
        std::fill(
            line(packed_values.end), line(std::max(packed_values.end, from / Dot::DEPTH * Dot::DEPTH)), 0.0f);
        Dot::template visit<true>(
            values, std::max(packed_values.end, from), to, [&](long key, const Number* v, const Number* next) {
                for (long d = 0; d < size; d += WIDTH) {
                    const Floats value = Dot::load_values(v, next, d);
                    store(line(key) + d, value);
#ifdef HAS_AMX
                    if constexpr (USES_AMX) maxima = Dot::max_bits(maxima, value);
#endif
                }
            });
#ifdef HAS_AMX
        if constexpr (USES_AMX) packed_values.is_finite &= Dot::are_finite(maxima);
#endif
        const long filled = (to + Dot::DEPTH - 1) / Dot::DEPTH * Dot::DEPTH;
        std::fill(line(filled), line((to + Dot::CHUNK - 1) / Dot::CHUNK * Dot::CHUNK), 0.0f);
        packed_values.end = std::max(packed_values.end, to / Dot::DEPTH * Dot::DEPTH);
        return packed;
    }

    template <int count>
    void score_rows(const Tile& tile, const float* queries, float* scores, const float* transposed, long row) const {
        Floats products[count];
        multiply_keys<Dot, count>(queries + row * num_lanes(), transposed, num_lanes(), products);
        for (int i = 0; i < count; i++)
            store(scores + (row + i) * tile.score_stride, broadcast(scale) * products[i]);
    }

    // Each row adds the values of its keys in order. For VALUE_ROWS rows at a time, the keys that all of them see are
    // read once, from the packed values; each row reads the keys before and after these by itself, from the cache.
    void add_values_packed(const Tile& tile, const float* weights, float* sums) const {
        const float* const packed = pack_values(tile.first_key, tile.last_key);
        for (long first_row = 0; first_row < tile.rows; first_row += VALUE_ROWS) {
            const long count = std::min(VALUE_ROWS, tile.rows - first_row);
            const long last_first = first_visible(tile.token(first_row + count - 1));
            const long common_begin = (last_first + Dot::DEPTH - 1) / Dot::DEPTH * Dot::DEPTH;
            const long common_end = end_visible(tile.token(first_row)) / Dot::DEPTH * Dot::DEPTH;
            const auto add_alone = [&](long key_begin, long key_end, long row) {
                const auto add_pair = [&](long key, const Number* v, const Number* next) {
                    add(weights + row * tile.score_stride, key - tile.first_key, v, next, sums + row * D);
                };
                Dot::template visit<false>(values, key_begin, key_end, add_pair);
            };
            const bool has_common = count == VALUE_ROWS && common_begin < common_end;
            for (long row = first_row; row < first_row + count; row++)
                add_alone(
                    first_visible(tile.token(row)), has_common ? common_begin : end_visible(tile.token(row)), row);
            if (has_common) {
                add_common(
                    tile, weights + first_row * tile.score_stride, packed, sums + first_row * D, common_begin,
                    common_end);
                for (long row = first_row; row < first_row + count; row++)
                    add_alone(common_end, end_visible(tile.token(row)), row);
            }
        }
    }

    void add_common(
        const Tile& tile, const float* weights, const float* packed, float* sums, long begin, long end) const {
        constexpr int VECTORS = HAS_AVX512 ? 4 : 1;  // vectors of a head whose sums fit into the registers
        for (long d = 0; d < D; d += VECTORS * WIDTH) {
            if (D - d < VECTORS * WIDTH)
                for (long i = d; i < D; i += WIDTH) add_vectors<1>(tile, weights, packed + i, sums + i, begin, end);
            else
                add_vectors<VECTORS>(tile, weights, packed + d, sums + d, begin, end);
        }
    }

    template <int vectors>
    void add_vectors(
        const Tile& tile, const float* weights, const float* packed, float* sums, long begin, long end) const {
        Floats totals[VALUE_ROWS][vectors];
        UNROLL for (int row = 0; row < VALUE_ROWS; row++)
            UNROLL for (int i = 0; i < vectors; i++) totals[row][i] = load(sums + row * D + i * WIDTH);
        const long score_stride = tile.score_stride, first_key = tile.first_key, size = D;
        const float* value = packed + (begin - packed_values.begin) / Dot::DEPTH * size;
        for (long key = begin; key < end; key += Dot::DEPTH, value += size)
            UNROLL for (int row = 0; row < VALUE_ROWS; row++) {
                const Floats weight = Dot::broadcast_weight(weights + row * score_stride, key - first_key);
                UNROLL for (int i = 0; i < vectors; i++)
                    totals[row][i] = Dot::multiply(totals[row][i], weight, load(value + i * WIDTH));
            }
        UNROLL for (int row = 0; row < VALUE_ROWS; row++)
            UNROLL for (int i = 0; i < vectors; i++) store(sums + row * D + i * WIDTH, totals[row][i]);
    }
};

// Sequence s has the rows of q from cu_seqlens[s] up to cu_seqlens[s + 1], the first of them at position start[s].
//
// cu_seqlens has S + 1 numbers, `start` has S.
template <class Number>
STRUCT(
    AttentionArguments,
    (const Number*, q),
    (const Number*, keys),
    (const Number*, values),
    (Number*, z),
    (const int64_t*, blocks),  // (S, max_blocks)
    (const int64_t*, cu_seqlens),
    (const int64_t*, start),
    (long, num_sequences),
    (long, max_blocks),
    (long, block_size),
    (long, H),
    (long, Hkv),
    (long, D),
    (long, window),  // or 0
    (long, q_stride),
    (long, k_stride),
    (long, v_stride),
    (double, scale),
    (double, softcap));  // or 0

template <class Number, class Dot>
void attention(const AttentionArguments<Number>& args, long task, long num_tasks) {
    const Number *q = args.q, *keys = args.keys, *values = args.values;
    Number* z = args.z;
    const int64_t *blocks = args.blocks, *cu_seqlens = args.cu_seqlens, *start = args.start;
    const long num_sequences = args.num_sequences, max_blocks = args.max_blocks, block_size = args.block_size;
    const long H = args.H, Hkv = args.Hkv, D = args.D, window = args.window;
    const long group = H / Hkv, tile_tokens = std::max(1L, TILE_ROWS / group);
    // Tiles that read the cache in place have several key heads each, but only so many that at least four tiles remain
    // if num_sequences * Hkv is at least four (with one new token per sequence).
    const long heads_in_place = std::clamp(num_sequences * Hkv / 4, 1L, Hkv);
    const auto heads_per_tile = [&](long num_new) { return num_new * group < MIN_PACKED_ROWS ? heads_in_place : 1; };
    long num_tiles = 0;
    for (long s = 0; s < num_sequences; s++) {
        const long num_new = cu_seqlens[s + 1] - cu_seqlens[s], heads = heads_per_tile(num_new);
        num_tiles += (Hkv + heads - 1) / heads * ((num_new + tile_tokens - 1) / tile_tokens);
    }
    static thread_local Scratch scratch;
    static thread_local Packed transposed_keys, packed_values;
    static thread_local std::vector<Number> zeros;
    if ((long)zeros.size() < Hkv * D) zeros.resize(Hkv * D);
    long tile = 0;
    for (long s = 0; s < num_sequences; s++) {
        const long num_new = cu_seqlens[s + 1] - cu_seqlens[s], heads = heads_per_tile(num_new);
        for (long key_head = 0; key_head < Hkv; key_head += heads) {
            transposed_keys.begin = transposed_keys.end = packed_values.begin = packed_values.end = 0;
            for (long begin = 0; begin < num_new; begin += tile_tokens, tile++)
                if (tile >= num_tiles * task / num_tasks && tile < num_tiles * (task + 1) / num_tasks) {
                    const long q_stride = args.q_stride, num_heads = std::min(heads, Hkv - key_head);
                    const int64_t* const own_blocks = blocks + s * max_blocks;
                    const SequenceAttention<Number, Dot> attention = {
                        {keys + key_head * D, own_blocks, block_size, args.k_stride, num_heads * D, zeros.data()},
                        {values + key_head * D, own_blocks, block_size, args.v_stride, num_heads * D, zeros.data()},
                        q + cu_seqlens[s] * q_stride + key_head * group * D,
                        z + (cu_seqlens[s] * H + key_head * group) * D,
                        start[s], num_heads, group, q_stride, H, D, window,
                        (float)args.scale, (float)args.softcap, scratch, transposed_keys, packed_values,
                    };
                    attention.attend(begin, std::min(begin + tile_tokens, num_new));
                }
        }
    }
}

// The scores, the masked scores and the pattern, each (H, N, S), of one sequence with N new tokens, the first of them
// at position start[0], and S = start[0] + N keys. A recorded call reads `start` and `blocks` when it is replayed.
template <class Number>
STRUCT(
    AttentionScoresArguments,
    (const Number*, q),     // (N, H, D)
    (const Number*, keys),  // (slots, Hkv, D)
    (const int64_t*, blocks),
    (const int64_t*, start),  // (1)
    (Number*, scores),
    (Number*, masked),
    (Number*, pattern),
    (long, N),
    (long, block_size),
    (long, H),
    (long, Hkv),
    (long, D),
    (long, window),  // or 0
    (long, q_stride),
    (long, k_stride),
    (double, scale),
    (double, softcap));  // or 0

template <class Number, class Dot>
void attention_scores(const AttentionScoresArguments<Number>& args, long task, long num_tasks) {
    const Number *q = args.q, *keys = args.keys;
    const long N = args.N, start = *args.start, S = start + N, H = args.H, Hkv = args.Hkv, D = args.D;
    const long q_stride = args.q_stride, k_stride = args.k_stride;
    const long group = H / Hkv, tile_tokens = std::max(1L, TILE_ROWS / group);
    const long num_tiles = (N + tile_tokens - 1) / tile_tokens;  // of one key head
    static thread_local Scratch scratch;
    static thread_local Packed transposed_keys, packed_values;
    transposed_keys.begin = transposed_keys.end = 0;
    for (long tile = Hkv * num_tiles * task / num_tasks; tile < Hkv * num_tiles * (task + 1) / num_tasks; tile++) {
        const long key_head = tile / num_tiles, begin = tile % num_tiles * tile_tokens, to = key_head * group * N * S;
        if (begin == 0) transposed_keys.begin = transposed_keys.end = 0;
        const CacheRows<Number> head_keys = {
            keys + key_head * D, args.blocks, args.block_size, k_stride, D, nullptr,
        };
        const SequenceAttention<Number, Dot> attention = {
            head_keys, head_keys, q + key_head * group * D, nullptr, start, 1, group, q_stride, H, D,
            args.window, (float)args.scale, (float)args.softcap, scratch, transposed_keys, packed_values,
        };
        attention.write_scores(
            begin, std::min(begin + tile_tokens, N), N, S, args.scores + to, args.masked + to,
            args.pattern + to);
    }
}

bool uses_amx(long D) { return D % AmxDot::CHUNK == 0 && is_amx_allowed(); }

void attention_bfloat16_by_best_unit(const AttentionArguments<BFloat16>& args, long task, long num_tasks) {
    uses_amx(args.D) ? attention<BFloat16, AmxDot>(args, task, num_tasks)
                     : attention<BFloat16, BFloat16Dot>(args, task, num_tasks);
}

void attention_scores_bfloat16_by_best_unit(
    const AttentionScoresArguments<BFloat16>& args, long task, long num_tasks) {
    uses_amx(args.D) ? attention_scores<BFloat16, AmxDot>(args, task, num_tasks)
                     : attention_scores<BFloat16, BFloat16Dot>(args, task, num_tasks);
}

}  // namespace

EXPORT_CONSTANT(WIDTH)

KERNEL(attention_float32, attention<float, Float32Dot<float>>)
KERNEL(attention_bfloat16, attention_bfloat16_by_best_unit)
KERNEL(attention_scores_float32, attention_scores<float, Float32Dot<float>>)
KERNEL(attention_scores_bfloat16, attention_scores_bfloat16_by_best_unit)
