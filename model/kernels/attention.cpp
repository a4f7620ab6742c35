// Attention of the new tokens of several sequences over keys and values that lie in blocks.
//
// q and z (N, H, D) of all new tokens in a row, those of q some stride apart; keys and values (slots, Hkv, D) of one
// layer, slots some stride apart; blocks (S, max_blocks), the blocks of each of the S sequences in order, `size` slots
// each. A token at position p sees the keys from max(0, p - window + 1) up to p. All is added up in float32 (where the
// CPU multiplies pairs of bfloat16, weights of such values are rounded to it before), in an order that depends on the
// token's position alone: the result is the same, to the bit, whether a prompt is read at once, in parts or token by
// token, and whoever is beside it.
//
// Few tokens read each key and value as it lies. Many turn 16 keys at a time, so that a vector holds 16 keys, lay the
// values in a row, and read them all. Both add up the products of q and k in the same order: in each of 16 lanes first,
// then the lanes as a tree. The matrix unit, where there is one, has its own order, the same for few and many.

#include <limits>
#include <vector>

#include "amx.h"
#include "kernel.h"

namespace {

constexpr long TILE = 32;               // rows, heads of new tokens, that read keys together
constexpr long AHEAD = 8;               // keys that are fetched while one is read
constexpr long FEW = 4;                 // rows that do not turn them; many add up values for so many rows at a time
constexpr long ROWS = IS_WIDE ? 8 : 4;  // that read turned keys at a time
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Some heads of the keys or values of one sequence: row `index` is that of its token at this position.
template <class Number>
struct Rows {
    const Number* pool;
    const int64_t* blocks;
    long size, stride, width;  // width: numbers of a row that are read
    const Number* zeros;       // a row of them

    const Number* operator[](long index) const { return pool + (blocks[index / size] * size + index % size) * stride; }

    // What is read for the first time is fetched before.
    template <bool fetches, class Visit>
    void visit(long begin, long end, Visit each) const {
        while (begin < end) {
            const long next = std::min(end, (begin / size + 1) * size);
            const Number *row = (*this)[begin], *const following = next < end ? (*this)[next] : row;
            for (; begin < next; begin++, row += stride) {
                if (fetches) prefetch(row, following, begin - next);
                each(begin, row);
            }
        }
    }

    // The same by pairs, an even index and the odd one after it, each with its row; zeros for one out of the range.
    template <bool fetches, class Visit>
    void visit_pairs(long begin, long end, Visit each) const {
        if (begin % 2 && begin < end) each(begin - 1, zeros, (*this)[begin]), begin++;
        while (begin < end) {
            const long next = std::min(end, (begin / size + 1) * size);
            const Number *row = (*this)[begin], *const following = next < end ? (*this)[next] : row;
            for (; begin + 1 < next; begin += 2, row += 2 * stride) {
                for (long i = 0; fetches && i < 2; i++) prefetch(row + i * stride, following, begin + i - next);
                each(begin, row, row + stride);
            }
            if (begin < next) each(begin, row, next < end ? following : zeros), begin += 2;
        }
    }

    // The processor itself finds neither the next block nor, where few heads are read, the next row.
    void prefetch(const Number* row, const Number* following, long from_next) const {
        fetch(from_next + AHEAD < 0 ? row + AHEAD * stride : following + (from_next + AHEAD) * stride);
    }

    void fetch(const Number* row) const {
        const char *const from = (const char*)row, *const to = (const char*)(row + width);
        for (const char* line = from; line < to; line += 64) _mm_prefetch(line, _MM_HINT_T0);
    }
};

// Numbers that stay from call to call, at whole lines of the processor's cache. What it held is lost when it grows.
struct Room {
    std::vector<float> numbers;

    bool has(size_t size) const { return numbers.size() >= size + WIDTH; }

    float* reach(size_t size) {
        if (!has(size)) numbers.assign(std::max(size + WIDTH, 2 * numbers.size()), 0.0f);
        return (float*)(((uintptr_t)numbers.data() + 63) / 64 * 64);
    }
};

// Of `count` scores (whole vectors, filled up with -inf): each e^(score - max) goes to `put`; gives their sum.
template <class Put>
float exponentials(const float* scores, long count, Put put) {
    Floats largest = set(NONE);
    for (long i = 0; i < count; i += WIDTH) largest = max(largest, load(scores + i));
    const Floats shift = set(most_of(largest));
    Floats sum = Floats{};
    for (long i = 0; i < count; i += WIDTH) {
        const Floats value = exponential(load(scores + i) - shift);
        put(i, value);
        sum = sum + value;
    }
    return sum_of(sum);
}

// Products in each lane of 32 bits: of float32 numbers, or of pairs of bfloat16 ones. Of q and k: of one number, or of
// two that stand side by side. Of weights and values: of one key, or of an even one and the next; a row's weights stand
// where its scores stood. Keys are multiplied by CHUNKs of the sequence.
template <class Number>
struct InFloat32 {
    static constexpr long DEPTH = 1, CHUNK = 1;
    using Weight = float;
    static Floats weight(const float* weights, long key) { return set(weights[key]); }
    static Floats value(const Number* row, const Number*, long d) { return load(row + d); }
    template <bool fetches, class Visit>
    static void visit(const Rows<Number>& values, long begin, long end, Visit each) {
        values.template visit<fetches>(begin, end, [&](long key, const Number* row) { each(key, row, row); });
    }
    static Floats take(const Number* from, long) { return load(from); }
    static Floats multiply(Floats sum, Floats q, Floats k) { return fma(q, k, sum); }
};

#ifdef __AVX512BF16__
struct InBFloat16 {
    static constexpr long DEPTH = 2, CHUNK = 2;
    static Floats take(const BFloat16* from, long left) {  // heads are whole vectors of 16, not of 32
        return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(left < 2 * WIDTH ? 0xffff : 0xffffffff, from));
    }
    using Weight = BFloat16;
    static Floats weight(const float* weights, long key) {
        return _mm512_castsi512_ps(_mm512_set1_epi32(((const int32_t*)weights)[key / 2]));
    }
    static Floats value(const BFloat16* even, const BFloat16* odd, long d) {
        const __m256i low = _mm256_loadu_si256((const __m256i*)(even + d));
        const __m512i both = _mm512_inserti64x4(
            _mm512_castsi256_si512(low), _mm256_loadu_si256((const __m256i*)(odd + d)), 1);
        const __m512i first = _mm512_setr_epi32(
            0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008, 0x190009,
            0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(first, both));
    }
    template <bool fetches, class Visit>
    static void visit(const Rows<BFloat16>& values, long begin, long end, Visit each) {
        values.visit_pairs<fetches>(begin, end, each);
    }
    static Floats multiply(Floats sum, Floats q, Floats k) { return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)k); }
};
#else
using InBFloat16 = InFloat32<BFloat16>;
#endif

// By the matrix unit: 16 pairs at a time, the even and the odd ones of which are added up apart.
struct InMatrices : InBFloat16 {
    static constexpr long CHUNK = 32;
#ifdef HAS_AMX
    // The bits of the largest numbers of both, without their signs; and whether all of such are finite.
    static Integers largest(Integers most, Floats pairs) {
        return (Integers)_mm512_max_epu16((__m512i)most, (__m512i)(as_bits(pairs) & set_integer(0x7fff7fff)));
    }
    static bool are_finite(Integers most) {
        return !_mm512_cmpge_epu16_mask((__m512i)most, _mm512_set1_epi16(0x7f80));
    }
#endif
};

// Of `rows` rows of q, `lanes` apart, and 16 turned keys [lanes][16]: the products with each key, those of every 16th
// lane added up, then these sums as a tree.
template <class Dot, int rows, int lane = 0, int step = 1>
[[gnu::always_inline]] inline void multiply_keys(
    const float* q, const float* turned, long lanes, Floats (&sums)[rows]) {
    if constexpr (step == WIDTH) {
        UNROLL for (int row = 0; row < rows; row++) sums[row] = Floats{};
        for (long at = lane; at < lanes; at += WIDTH) {
            const Floats k = load(turned + at * WIDTH);
            UNROLL for (int row = 0; row < rows; row++)
                sums[row] = Dot::multiply(sums[row], set(q[row * lanes + at]), k);
        }
    } else {
        Floats others[rows];
        multiply_keys<Dot, rows, lane, 2 * step>(q, turned, lanes, sums);
        multiply_keys<Dot, rows, lane + step, 2 * step>(q, turned, lanes, others);
        UNROLL for (int row = 0; row < rows; row++) sums[row] = sums[row] + others[row];
    }
}

// Keys or values of one head as many rows read them, from the key `begin` on; up to `end` they are good for later
// tiles.
struct Prepared {
    Room room;
    long begin = 0, end = 0;
    bool is_finite = true;  // all that is there

    // Room for the keys up to `to`, of which those from `from` on are wanted (it never falls); those before `end` are
    // there.
    float* reach(long from, long to, long numbers_of_key) {
        if (from > end) begin = end = from;
        const size_t size = (to - begin + TILE - 1) / TILE * TILE * numbers_of_key;
        if (!room.has(size)) end = begin;
        return room.reach(size);
    }
};

// What new tokens of one sequence attend to, in the query heads of one or several heads of keys.
template <class Number, class Dot>
struct Reader {
    static constexpr bool IN_MATRICES = std::is_same_v<Dot, InMatrices>;
    Rows<Number> keys, values;
    const Number* q;  // of the sequence's first new token and the first head
    Number* z;
    long start, heads, group, q_stride, H, D, window;  // start: the position of the first new token
    float scale;
    Room& memory;
    Prepared &turned, &spread;

    long first(long token) const { return window ? std::max(0L, start + token - window + 1) : 0; }
    long end_of(long token) const { return start + token + 1; }
    long lanes() const { return (D + Dot::DEPTH * WIDTH - 1) / (Dot::DEPTH * WIDTH) * WIDTH; }

    // A vector of lanes of a row of q or k.
    Floats take(const Number* row, long lane) const {
        return Dot::take(row + lane * Dot::DEPTH, D - lane * Dot::DEPTH);
    }

    // The tokens [begin, end) with the keys [first_key, last_key). A row is one of the tokens in one query head: those
    // of a head of keys stand together.
    struct Tile {
        const Reader& of;
        long begin, end, first_key, last_key;
        long of_head = (end - begin) * of.group, rows = of.heads * of_head;
        long padded = (last_key - first_key + WIDTH - 1) / WIDTH * WIDTH + WIDTH;  // numbers from row to row of scores

        long row(long token, long head) const { return head * of_head + (token - begin) * of.group; }
        long token(long row) const { return begin + row % of_head / of.group; }
        long head(long row) const { return row / of_head * of.group + row % of.group; }
        bool is_few() const { return of_head < FEW; }
    };

    // Room for the scores of a tile, (rows, padded), for (rows, D) numbers behind them, and then for `more`.
    float* make_room(const Tile& tile, long more) const {
        return memory.reach(tile.rows * (tile.padded + D) + more);
    }

    // The scores, behind which it uses (rows, D) numbers.
    void score(const Tile& tile, float* scores) const {
        float* const queries = scores + tile.rows * tile.padded;
        for (long row = 0; row < tile.rows; row++)
            for (long lane = 0; lane < lanes(); lane += WIDTH)
                store(queries + row * lanes() + lane, take(q + tile.token(row) * q_stride + tile.head(row) * D, lane));
#ifdef HAS_AMX
        if constexpr (IN_MATRICES) return score_in_matrices(tile, queries, scores);
#endif
        const Reader copy = *this;  // whose members, to the compiler, no store changes
        tile.is_few() ? copy.score_few(tile, queries, scores) : score_many(tile, queries, scores);
    }

    // The scores of a row -> their exponentials, in place, and of those that share a lane with them none; their sum.
    template <class Weight>
    float weigh(const Tile& tile, long row, float* scores) const {
        const long own = first(tile.token(row)) - tile.first_key, end = end_of(tile.token(row)) - tile.first_key;
        const long whole = (end - own + WIDTH - 1) / WIDTH * WIDTH;
        Weight* const weights = (Weight*)scores;
        std::fill(scores + end, scores + own + whole, NONE);
        const float sum = exponentials(
            scores + own, whole, [&](long i, Floats value) { store(weights + own + i, value); });
        const long chunk = Dot::CHUNK, keys = tile.last_key - tile.first_key;  // of matrices, all rows read the same
        std::fill(weights + (IN_MATRICES ? 0 : own / chunk * chunk), weights + own, 0);
        std::fill(weights + end, weights + ((IN_MATRICES ? keys : end) + chunk - 1) / chunk * chunk, 0);
        return sum;
    }

    void read(long begin, long end) const {
        const long alignment = (end - begin) * group < FEW ? Dot::CHUNK : std::max<long>(WIDTH, Dot::CHUNK);
        const Tile tile = {*this, begin, end, first(begin) / alignment * alignment, start + end};
        float *const scores = make_room(tile, tile.rows), *const totals = scores + tile.rows * (tile.padded + D);
        score(tile, scores);
        for (long row = 0; row < tile.rows; row++)
            totals[row] = weigh<typename Dot::Weight>(tile, row, scores + row * tile.padded);
        float* const sums = scores + tile.rows * tile.padded;  // where the queries were
#ifdef HAS_AMX
        if constexpr (IN_MATRICES) add_in_matrices(tile, scores, sums);
#endif
        if constexpr (!IN_MATRICES) {
            std::fill(sums, sums + tile.rows * D, 0.0f);
            tile.is_few() ? add_few(tile, scores, sums) : add_many(tile, scores, sums);
        }
        for (long row = 0; row < tile.rows; row++)
            for (long d = 0; d < D; d += WIDTH)
                store(z + (tile.token(row) * H + tile.head(row)) * D + d, load(sums + row * D + d) / set(totals[row]));
    }

    // The same tokens, spelled out: scores with all S keys, masked ones, and their softmax, each (H, N, S).
    void show(long begin, long end, long N, long S, Number* of_scores, Number* of_masked, Number* of_pattern) const {
        const Tile tile = {*this, begin, end, 0, S};
        float* const scores = make_room(tile, 0);
        score(tile, scores);
        for (long row = 0; row < tile.rows; row++) {
            float* const of_row = scores + row * tile.padded;
            const long own = first(tile.token(row)), end_own = end_of(tile.token(row));
            const long to = (tile.head(row) * N + tile.token(row)) * S;
            const auto visible = [&](Floats value, long i, float others) {
                return select(first_of(own - i), set(others), select(first_of(end_own - i), value, set(others)));
            };
            for (long i = 0; i < S; i += WIDTH) {
                const Floats value = load(of_row + i);
                write(of_scores + to, i, S, value);
                write(of_masked + to, i, S, visible(value, i, NONE));
            }
            const float sum = weigh<float>(tile, row, of_row);
            for (long i = 0; i < S; i += WIDTH)
                write(of_pattern + to, i, S, visible(load(of_row + i) / set(sum), i, 0.0f));
        }
    }

    static void write(Number* to, long i, long size, Floats value) {
        i + WIDTH <= size ? store(to + i, value) : store(to + i, value, first_of(size - i));
    }

    // A few rows read each key as it lies.
    void score_few(const Tile& tile, const float* queries, float* scores) const {
        keys.template visit<true>(tile.first_key, tile.last_key, [&](long key, const Number* k) {
            long left = tile.of_head;  // rows of the head at k
            for (long row = 0; row < tile.rows; row++) {
                Floats products = Floats{};
                for (long lane = 0; lane < lanes(); lane += WIDTH)
                    products = Dot::multiply(products, load(queries + row * lanes() + lane), take(k, lane));
                scores[row * tile.padded + key - tile.first_key] = scale * sum_of(products);
                if (--left == 0) left = tile.of_head, k += D;
            }
        });
    }

    void add_few(const Tile& tile, const float* weights, float* sums) const {
        const auto add_pair = [&](long key, const Number* v, const Number* next) {
            for (long token = tile.begin; token < tile.end; token++) {
                const bool sees_own = sees(token, key), sees_next = Dot::DEPTH > 1 && sees(token, key + 1);
                if (!sees_own && !sees_next) continue;
                const Number *own = sees_own ? v : values.zeros, *others = sees_next ? next : values.zeros;
                for (long head = 0; head < heads; head++, own += D, others += D)
                    for (long row = tile.row(token, head), end = row + group; row < end; row++)
                        add(weights + row * tile.padded, key - tile.first_key, own, others, sums + row * D);
            }
        };
        Dot::template visit<true>(values, tile.first_key, tile.last_key, add_pair);
    }

#ifdef HAS_AMX
    void score_in_matrices(const Tile& tile, const float* queries, float* scores) const {
        if (tile.is_few()) return score_few_in_matrices(tile, queries, scores);
        const float* const all = turn(tile.first_key, tile.last_key);
        Shape shape;
        for (long row = 0; row < tile.rows; row += 2 * WIDTH) {
            const long num_rows = std::min(tile.rows - row, 2L * WIDTH);
            shape.set(num_rows);
            for (long key = tile.first_key; key < tile.last_key; key += 2 * WIDTH) {
                float* const to = scores + row * tile.padded + key - tile.first_key;
                const long tiles = tile.last_key - key > WIDTH ? 2 : 1;
                multiply_block(
                    num_rows, tiles, queries + row * lanes(), lanes() * 4, all + (key - turned.begin) * lanes(), LINE,
                    lanes() * LINE, lanes() / WIDTH, to, tile.padded * 4);
                for (long of = 0; of < num_rows; of++)
                    for (long i = 0; i < tiles * WIDTH; i += WIDTH) {
                        float* const vector = to + of * tile.padded + i;
                        store(vector, set(scale) * load(vector));
                    }
            }
        }
    }

    // Keys as they lie, 16 at a time, by turned queries: a product adds up the same numbers in the same order.
    void score_few_in_matrices(const Tile& tile, const float* queries, float* scores) const {
        const long size = lanes() * WIDTH;  // of a head's queries [lane][row]
        static thread_local Room room;
        float *const turned = room.reach(heads * size + WIDTH * lanes()), *const copy = turned + heads * size;
        std::fill(turned, turned + heads * size, 0.0f);
        for (long row = 0; row < tile.rows; row++)
            for (long lane = 0; lane < lanes(); lane++)
                turned[row / tile.of_head * size + lane * WIDTH + row % tile.of_head] = queries[row * lanes() + lane];
        Shape shape;
        shape.set(WIDTH);
        for (long key = tile.first_key; key < tile.last_key; key += WIDTH) {
            const long count = std::min<long>(tile.last_key - key, WIDTH);
            const Number* rows[WIDTH];
            keys.template visit<false>(key, key + count, [&](long of, const Number* row) {
                rows[of - key] = row;
            });
            keys.template visit<false>(
                std::min(key + WIDTH, tile.last_key), std::min(key + 2 * WIDTH, tile.last_key),
                [&](long, const Number* row) { keys.fetch(row); });
            const bool is_whole = count == WIDTH && keys.size % WIDTH == 0;  // so that they lie in one block
            for (long head = 0; head < heads; head++) {
                for (long i = 0; i < count && !is_whole; i++)
                    std::memcpy(copy + i * lanes(), rows[i] + head * D, D * sizeof(Number));
                const void* const x = is_whole ? (const void*)(rows[0] + head * D) : copy;
                alignas(LINE) float found[WIDTH][WIDTH];
                multiply_tiles<false, 1, false>(
                    x, is_whole ? keys.stride * sizeof(Number) : lanes() * 4, turned + head * size, LINE, 0,
                    lanes() / WIDTH, found, LINE, [](long) {});
                for (long row = 0; row < tile.of_head; row++) {
                    float* const to = scores + (head * tile.of_head + row) * tile.padded + key - tile.first_key;
                    for (long i = 0; i < count; i++) to[i] = scale * found[i][row];
                }
            }
        }
    }

    void add_in_matrices(const Tile& tile, const float* weights, float* sums) const {
        Shape shape;
        const float* const all = spread_values(tile.first_key, tile.last_key);
        for (long head = 0; head < heads && spread.is_finite; head++)
            for (long row = head * tile.of_head, end = row + tile.of_head; row < end; row += 2 * WIDTH)
                add_rows(tile, row, std::min(end - row, 2L * WIDTH), all, tile.last_key, weights, sums, shape);
        if (spread.is_finite) return;
        for (long row = 0; row < tile.rows; row++) {  // not even with a weight of 0 may it read what it does not see
            const long from = first(tile.token(row)), end = end_of(tile.token(row));
            spread.begin = spread.end = from / Dot::CHUNK * Dot::CHUNK;
            add_rows(tile, row, 1, spread_values(from, end), end, weights, sums, shape);
        }
    }

    void add_rows(
        const Tile& tile, long row, long num_rows, const float* all, long end, const float* weights, float* sums,
        Shape& shape) const {
        shape.set(num_rows);
        const long begin = std::max(spread.begin, tile.first_key), width = heads * D, head = row / tile.of_head;
        const float* const w = all + (begin - spread.begin) / Dot::DEPTH * width + head * D;
        const auto* const x = (const typename Dot::Weight*)(weights + row * tile.padded) + begin - tile.first_key;
        for (long d = 0; d < D; d += 2 * WIDTH)
            multiply_block(
                num_rows, 2, x, tile.padded * 4, w + d, width * 4, LINE,
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

    bool sees(long token, long key) const { return key >= first(token) && key < end_of(token); }

    void add(const float* weights, long key, const Number* v, const Number* next, float* sums) const {
        for (long d = 0; d < D; d += WIDTH)
            store(sums + d, Dot::multiply(load(sums + d), Dot::weight(weights, key), Dot::value(v, next, d)));
    }

    void score_many(const Tile& tile, const float* queries, float* scores) const {
        const float* const all = turn(tile.first_key, tile.last_key);
        for (long key = tile.first_key; key < tile.last_key; key += WIDTH) {
            const float* const k = all + (key - turned.begin) * lanes();
            float* const of_key = scores + key - tile.first_key;
            long row = 0;
            for (; row + ROWS <= tile.rows; row += ROWS) score_rows<ROWS>(tile, queries, of_key, k, row);
            for (; row < tile.rows; row++) score_rows<1>(tile, queries, of_key, k, row);
        }
    }

    // Keys [key / 16][lane][key % 16], from a multiple of 16 on.
    const float* turn(long from, long to) const {
        float* const all = turned.reach(from, to, lanes());
        for (long key = turned.end; key < to; key += WIDTH) {
            const Number* k[WIDTH];
            keys.template visit<false>(key, std::min(key + WIDTH, to), [&](long of, const Number* row) {
                k[of - key] = row;
            });
            for (long i = to - key; i < WIDTH; i++) k[i] = k[i - 1];
            for (long lane = 0; lane < lanes(); lane += WIDTH) {
                Floats part[WIDTH];
                for (long i = 0; i < WIDTH; i++) part[i] = take(k[i], lane);
                transpose(part, all + (key - turned.begin) * lanes() + lane * WIDTH);
            }
        }
        turned.end = std::max(turned.end, to / WIDTH * WIDTH);
        return all;
    }

    // Values [key / DEPTH][heads][D], as they are multiplied, from a multiple of DEPTH on, filled up with zeros to a chunk.
    const float* spread_values(long from, long to) const {
        const long size = heads * D;
        float* const all = spread.reach(from / Dot::CHUNK * Dot::CHUNK, to, size);
        const long begin = spread.begin;
        const auto line = [&](long key) { return all + (key - begin) / Dot::DEPTH * size; };
        Integers most = {};
        if (spread.begin == spread.end) spread.is_finite = true;
        std::fill(line(spread.end), line(std::max(spread.end, from / Dot::DEPTH * Dot::DEPTH)), 0.0f);
        Dot::template visit<true>(
            values, std::max(spread.end, from), to, [&](long key, const Number* v, const Number* next) {
                for (long d = 0; d < size; d += WIDTH) {
                    const Floats value = Dot::value(v, next, d);
                    store(line(key) + d, value);
#ifdef HAS_AMX
                    if constexpr (IN_MATRICES) most = Dot::largest(most, value);
#endif
                }
            });
#ifdef HAS_AMX
        if constexpr (IN_MATRICES) spread.is_finite &= Dot::are_finite(most);
#endif
        const long filled = (to + Dot::DEPTH - 1) / Dot::DEPTH * Dot::DEPTH;
        std::fill(line(filled), line((to + Dot::CHUNK - 1) / Dot::CHUNK * Dot::CHUNK), 0.0f);
        spread.end = std::max(spread.end, to / Dot::DEPTH * Dot::DEPTH);
        return all;
    }

    template <int count>
    void score_rows(const Tile& tile, const float* queries, float* scores, const float* turned, long row) const {
        Floats products[count];
        multiply_keys<Dot, count>(queries + row * lanes(), turned, lanes(), products);
        for (int i = 0; i < count; i++)
            store(scores + (row + i) * tile.padded, set(scale) * products[i]);
    }

    // Each row adds the values of its keys in order. Keys that all rows see are read once for FEW rows.
    void add_many(const Tile& tile, const float* weights, float* sums) const {
        const float* const all = spread_values(tile.first_key, tile.last_key);
        for (long row = 0; row < tile.rows; row += FEW) {
            const long count = std::min(FEW, tile.rows - row);
            const long common_begin = (first(tile.token(row + count - 1)) + Dot::DEPTH - 1) / Dot::DEPTH * Dot::DEPTH;
            const long common_end = end_of(tile.token(row)) / Dot::DEPTH * Dot::DEPTH;
            const auto add_alone = [&](long key_begin, long key_end, long of) {
                const auto add_pair = [&](long key, const Number* v, const Number* next) {
                    add(weights + of * tile.padded, key - tile.first_key, v, next, sums + of * D);
                };
                Dot::template visit<false>(values, key_begin, key_end, add_pair);
            };
            const bool is_common = count == FEW && common_begin < common_end;
            for (long of = row; of < row + count; of++)
                add_alone(first(tile.token(of)), is_common ? common_begin : end_of(tile.token(of)), of);
            if (is_common) {
                add_common(tile, weights + row * tile.padded, all, sums + row * D, common_begin, common_end);
                for (long of = row; of < row + count; of++) add_alone(common_end, end_of(tile.token(of)), of);
            }
        }
    }

    void add_common(
        const Tile& tile, const float* weights, const float* all, float* sums, long begin, long end) const {
        constexpr int PART = IS_WIDE ? 4 : 1;  // vectors of a head at a time
        for (long d = 0; d < D; d += PART * WIDTH) {
            if (D - d < PART * WIDTH)
                for (long i = d; i < D; i += WIDTH) add_part<1>(tile, weights, all + i, sums + i, begin, end);
            else
                add_part<PART>(tile, weights, all + d, sums + d, begin, end);
        }
    }

    template <int part>
    void add_part(const Tile& tile, const float* weights, const float* all, float* sums, long begin, long end) const {
        Floats total[FEW][part];
        UNROLL for (int row = 0; row < FEW; row++)
            UNROLL for (int i = 0; i < part; i++) total[row][i] = load(sums + row * D + i * WIDTH);
        const long padded = tile.padded, first_key = tile.first_key, size = D;
        const float* value = all + (begin - spread.begin) / Dot::DEPTH * size;
        for (long key = begin; key < end; key += Dot::DEPTH, value += size)
            UNROLL for (int row = 0; row < FEW; row++) {
                const Floats weight = Dot::weight(weights + row * padded, key - first_key);
                UNROLL for (int i = 0; i < part; i++)
                    total[row][i] = Dot::multiply(total[row][i], weight, load(value + i * WIDTH));
            }
        UNROLL for (int row = 0; row < FEW; row++)
            UNROLL for (int i = 0; i < part; i++) store(sums + row * D + i * WIDTH, total[row][i]);
    }
};

// Sequence s has the new tokens of rows first_row[s] up to first_row[s + 1], the first of them at position start[s].
template <class Number, class Dot>
void attention(Arguments given, long part, long num_parts) {
    const Number *q = given.array<Number>(0), *keys = given.array<Number>(1), *values = given.array<Number>(2);
    Number* z = given.array<Number>(3);
    const int64_t *blocks = given.array<int64_t>(4), *first_row = given.array<int64_t>(5);
    const int64_t* start = given.array<int64_t>(6);
    const long num_sequences = given.size(7), max_blocks = given.size(8), size = given.size(9), H = given.size(10);
    const long Hkv = given.size(11), D = given.size(12), window = given.size(13), group = H / Hkv;
    const long tile = std::max(1L, TILE / group), few_heads = std::clamp(num_sequences * Hkv / 4, 1L, Hkv);
    const auto heads_of = [&](long num_new) { return num_new * group < FEW ? few_heads : 1; };
    long num_items = 0;
    for (long s = 0; s < num_sequences; s++) {
        const long num_new = first_row[s + 1] - first_row[s], heads = heads_of(num_new);
        num_items += (Hkv + heads - 1) / heads * ((num_new + tile - 1) / tile);
    }
    static thread_local Room memory;
    static thread_local Prepared turned, spread;
    static thread_local std::vector<Number> zeros;
    if ((long)zeros.size() < Hkv * D) zeros.resize(Hkv * D);
    long item = 0;
    for (long s = 0; s < num_sequences; s++) {
        const long num_new = first_row[s + 1] - first_row[s], heads = heads_of(num_new);
        for (long head = 0; head < Hkv; head += heads) {
            turned.begin = turned.end = spread.begin = spread.end = 0;
            for (long begin = 0; begin < num_new; begin += tile, item++)
                if (item >= num_items * part / num_parts && item < num_items * (part + 1) / num_parts) {
                    const long q_stride = given.size(17), count = std::min(heads, Hkv - head);
                    const int64_t* const own = blocks + s * max_blocks;
                    const Reader<Number, Dot> reader = {
                        {keys + head * D, own, size, given.size(15), count * D, zeros.data()},
                        {values + head * D, own, size, given.size(16), count * D, zeros.data()},
                        q + first_row[s] * q_stride + head * group * D, z + (first_row[s] * H + head * group) * D,
                        start[s], count, group, q_stride, H, D, window,
                        given.number(14), memory, turned, spread,
                    };
                    reader.read(begin, std::min(begin + tile, num_new));
                }
        }
    }
}

// Of one sequence with N new tokens, the first at position `start`, and S keys; tokens some stride apart.
template <class Number, class Dot>
void spell_out(Arguments given, long part, long num_parts) {
    const Number *q = given.array<Number>(0), *keys = given.array<Number>(1);
    const long N = given.size(6), start = given.size(7), S = given.size(8), H = given.size(9), Hkv = given.size(10);
    const long D = given.size(11), q_stride = given.size(14), k_stride = given.size(15), group = H / Hkv;
    const long tile = std::max(1L, TILE / group), num_tiles = (N + tile - 1) / tile;
    static thread_local Room memory;
    static thread_local Prepared turned, spread;
    turned.begin = turned.end = 0;
    for (long item = Hkv * num_tiles * part / num_parts; item < Hkv * num_tiles * (part + 1) / num_parts; item++) {
        const long head = item / num_tiles, begin = item % num_tiles * tile, to = head * group * N * S;
        if (begin == 0) turned.begin = turned.end = 0;
        const Rows<Number> of_head = {keys + head * D, given.array<int64_t>(2), S, k_stride, D, nullptr};
        const Reader<Number, Dot> reader = {
            of_head, of_head, q + head * group * D, nullptr, start, 1, group, q_stride, H, D,
            given.size(12), given.number(13), memory, turned, spread,
        };
        reader.show(begin, std::min(begin + tile, N), N, S, given.array<Number>(3) + to, given.array<Number>(4) + to,
                    given.array<Number>(5) + to);
    }
}

}  // namespace

KERNEL(spell_out_float32) { spell_out<float, InFloat32<float>>(given, part, num_parts); }
KERNEL(attention_float32) { attention<float, InFloat32<float>>(given, part, num_parts); }

KERNEL(spell_out_bfloat16) {
    const bool in_matrices = given.size(11) % InMatrices::CHUNK == 0 && is_amx_allowed();
    in_matrices ? spell_out<BFloat16, InMatrices>(given, part, num_parts)
                : spell_out<BFloat16, InBFloat16>(given, part, num_parts);
}

KERNEL(attention_bfloat16) {
    const bool in_matrices = given.size(12) % InMatrices::CHUNK == 0 && is_amx_allowed();
    in_matrices ? attention<BFloat16, InMatrices>(given, part, num_parts)
                : attention<BFloat16, InBFloat16>(given, part, num_parts);
}
