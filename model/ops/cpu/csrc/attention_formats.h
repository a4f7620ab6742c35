// How attention multiplies: numbers one by one, pairs of bfloat16, or pairs in the matrix unit.
//
// Scores (queries times keys) and sums of values (weights times values) are the same product of panels:
//
//   out[row][16 tile + lane] = sum over step of x[row][step] w[tile][step][lane]
//
// An element of x and of w has 32 bits: one float32 number, or a pair of bfloat16 numbers (DEPTH numbers). Each sum runs
// over the steps in order, so no bit of `out` depends on how many rows and tiles are computed together.

#pragma once

#include <limits>
#include <type_traits>

#include "amx.h"
#include "kernel.h"

struct Panel {
    const float* x;
    long x_stride;  // from row to row
    const float* w;
    long w_stride;  // from tile to tile
    long rows, tiles, steps;
    float* out;
    long out_stride;
};

// 2^x with a relative error of 3e-6, for weights that are rounded to bfloat16. NaN stays NaN.
inline Floats coarse_exp2(Floats x) {
    constexpr float COEFFICIENTS[] = {1.0f, 0.693124175f, 0.240240991f, 0.0559064262f, 0.00958285295f};
    x = max(broadcast(-160.0f), x);  // 2^x is 0 below
    const Floats n = round(x);
    return times_power_of_two(polynomial(COEFFICIENTS, x - n), n);
}

// Weights in float32: the exponential function as accurate as elsewhere.
struct AccurateWeights {
    static constexpr float LOG_BASE = 1.0f;  // weights are e^(LOG_BASE score)
    static Floats power(Floats x) { return exp(x); }
};

// Weights of bfloat16 networks: powers of 2.
struct CoarseWeights {
    static constexpr float LOG_BASE = 1.44269504f;  // log2(e)
    static Floats power(Floats x) { return coarse_exp2(x); }
};

// One float32 number in a lane. bfloat16 numbers are widened.
template <class NumberInCache>
struct SingleNumbers : std::conditional_t<std::is_same_v<NumberInCache, float>, AccurateWeights, CoarseWeights> {
    using Number = NumberInCache;
    using Weight = float;
    static constexpr long DEPTH = 1, KEY_STEP = WIDTH;
    static constexpr bool USES_AMX = false;

    static Floats multiply(Floats sum, Floats x, Floats w) { return fma(x, w, sum); }
    static Floats load_lanes(const Number* from, long) { return load(from); }
    // The values of one key in `tiles` times 16 dims from d on.
    template <int tiles>
    static void load_values(const Number* const* rows, long d, Floats (&vectors)[tiles]) {
        UNROLL for (int tile = 0; tile < tiles; tile++) vectors[tile] = load(rows[0] + d + tile * WIDTH);
    }
};

#ifdef HAS_PAIR_PRODUCTS
// A pair of bfloat16 numbers in a lane: two adjacent numbers of a head, or the values of an even key and the next key.
struct NumberPairs : CoarseWeights {
    using Number = BFloat16;
    using Weight = BFloat16;
    static constexpr long DEPTH = 2, KEY_STEP = WIDTH;
    static constexpr bool USES_AMX = false;

    static Floats multiply(Floats sum, Floats x, Floats w) { return add_pair_products(sum, as_bits(x), as_bits(w)); }
    static Floats load_lanes(const BFloat16* from, long count) {  // `count` numbers are left in the row
        return as_floats(count < 2 * WIDTH ? load_lower_half(from) : load_integers(from));
    }
    // The values of two keys in `tiles` times 16 dims from d on, interleaved.
    template <int tiles>
    [[gnu::always_inline]] static void load_values(const BFloat16* const* rows, long d, Floats (&vectors)[tiles]) {
        UNROLL for (int tile = 0; tile < tiles; tile += 2) {
            const long first = d + tile * WIDTH, count = (tiles - tile) * WIDTH;
            const Integers even = as_bits(load_lanes(rows[0] + first, count));
            const Integers odd = as_bits(load_lanes(rows[1] + first, count));
            vectors[tile] = as_floats(interleave_lower(even, odd));
            if (tile + 1 < tiles) vectors[tile + 1] = as_floats(interleave_upper(even, odd));
        }
    }
};
#else
using NumberPairs = SingleNumbers<BFloat16>;
#endif

// Pairs in the matrix unit, 16 of them at a time, of which the even and the odd numbers are summed separately.
struct MatrixUnitPairs : NumberPairs {
    static constexpr long KEY_STEP = 2 * WIDTH;
    static constexpr bool USES_AMX = true;
};

template <class Format, int rows, int tiles>
inline void multiply_block(const Panel& panel, long row, long tile) {
    constexpr int ROWS_PER_BASE = 3;  // three rows at 0, 1 and 2 strides from one pointer, as addresses allow
    constexpr int BASES = (rows + ROWS_PER_BASE - 1) / ROWS_PER_BASE;
    const long x_stride = panel.x_stride, w_stride = panel.w_stride;
    const float* x[BASES];
    UNROLL for (int i = 0; i < BASES; i++) x[i] = panel.x + (row + i * ROWS_PER_BASE) * x_stride;
    const float* w = panel.w + tile * w_stride;
    Floats sums[rows][tiles];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < tiles; j++) sums[i][j] = Floats{};
    for (long step = panel.steps; step > 0; step--, w += WIDTH) {
        Floats weights[tiles];
        UNROLL for (int j = 0; j < tiles; j++) weights[j] = load(w + j * w_stride);
        UNROLL for (int i = 0; i < rows; i++) {
            const Floats number = broadcast(x[i / ROWS_PER_BASE][i % ROWS_PER_BASE * x_stride]);
            UNROLL for (int j = 0; j < tiles; j++) sums[i][j] = Format::multiply(sums[i][j], number, weights[j]);
        }
        UNROLL for (int i = 0; i < BASES; i++) x[i]++;
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < tiles; j++)
            store(panel.out + (row + i) * panel.out_stride + (tile + j) * WIDTH, sums[i][j]);
}

constexpr int PANEL_ROWS = HAS_AVX512 ? 12 : 6;  // rows whose sums fit into the registers

// Multiplies `num_rows` rows, at most PANEL_ROWS. With few rows, more tiles keep the multipliers busy.
template <class Format, int rows = PANEL_ROWS>
void multiply_rows(const Panel& panel, long row, long num_rows) {
    if constexpr (rows > 1)
        if (num_rows < rows) return multiply_rows<Format, rows - 1>(panel, row, num_rows);
    constexpr int TILES = !HAS_AVX512 ? 1 : rows > 6 ? 2 : 4;
    long tile = 0;
    for (; tile + TILES <= panel.tiles; tile += TILES) multiply_block<Format, rows, TILES>(panel, row, tile);
    for (; tile < panel.tiles; tile++) multiply_block<Format, rows, 1>(panel, row, tile);
}

// Multiplies panels of one format. Holds the matrix unit's configuration from product to product.
template <class Format>
struct Multiplier {
    void operator()(const Panel& panel) {
        for (long row = 0; row < panel.rows; row += PANEL_ROWS)
            multiply_rows<Format>(panel, row, std::min<long>(panel.rows - row, PANEL_ROWS));
    }
};

#ifdef HAS_AMX
template <>
struct Multiplier<MatrixUnitPairs> {
    static constexpr long ROWS = 2 * WIDTH;
    TileConfig config;

    void operator()(const Panel& panel) {
        for (long row = 0; row < panel.rows; row += ROWS) {
            const long num_rows = std::min(panel.rows - row, ROWS);
            config.set_rows(num_rows);
            for (long tile = 0; tile < panel.tiles; tile += 2)
                if (tile + 1 < panel.tiles)
                    num_rows > WIDTH ? multiply<2, true>(panel, row, tile) : multiply<2, false>(panel, row, tile);
                else
                    num_rows > WIDTH ? multiply<1, true>(panel, row, tile) : multiply<1, false>(panel, row, tile);
        }
    }

   private:
    template <int tiles, bool has_upper_rows>
    static void multiply(const Panel& panel, long row, long tile) {
        constexpr long BYTES = sizeof(float);
        multiply_tiles<tiles, has_upper_rows>(
            panel.x + row * panel.x_stride, panel.x_stride * BYTES, panel.w + tile * panel.w_stride, LINE_BYTES,
            panel.w_stride * BYTES, panel.steps / WIDTH, panel.out + row * panel.out_stride + tile * WIDTH,
            panel.out_stride * BYTES, [](long) {});
    }
};
#endif
