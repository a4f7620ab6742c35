// Linear layers: y = x w^T + b, for few rows of x or many.
//
// x (M, K), y (M, N), b (N). The weights w are packed in tiles of 16 outputs, so that a vector holds 16 outputs:
//   float32:  [N / 16][K][16], one vector for each k.
//   bfloat16: [N / 16][K / 2][16][2], one vector for each pair of k's.
// The last tile is padded with zeros. For each group of up to ROWS rows of x, a product reads every weight once, in the
// order in which the weights lie. A task has some of the tiles, for all rows (gemm.h).
//
// Each result is one float32 sum over k in order; the matrix unit (AMX) takes 32 k's at a time, and sums the even and
// the odd ones separately. Neither order depends on M, so no bit of a row's result depends on the other rows.

#include <type_traits>

#include "amx.h"
#include "kernel.h"
#include "gemm.h"

namespace {

// How numbers are multiplied: DEPTH k's of an output lie side by side and are multiplied in STEPS instructions.
struct Float32Format {
    using Number = float;
    using Input = float;
    static constexpr int DEPTH = 1, STEPS = 1;
    static Floats weight(const float* w, int) { return load(w); }
    static Floats input(const float* x, int) { return broadcast(*x); }
    static Floats multiply(Floats sum, Floats x, Floats w) { return fma(x, w, sum); }
};

#ifdef HAS_PAIR_PRODUCTS
struct BFloat16Format {  // both numbers of a pair in one instruction
    using Number = BFloat16;
    using Input = BFloat16;
    static constexpr int DEPTH = 2, STEPS = 1;
    static Integers weight(const BFloat16* w, int) { return load_integers(w); }
    static Integers input(const BFloat16* x, int) {
        uint32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return broadcast_integer(pair);
    }
    static Floats multiply(Floats sum, Integers x, Integers w) { return add_pair_products(sum, w, x); }
};
#else
struct BFloat16Format {  // in float32, one number of a pair after the other
    using Number = BFloat16;
    using Input = float;
    static constexpr int DEPTH = 2, STEPS = 2;
    static Floats weight(const BFloat16* w, int step) {
        const Integers pairs = load_integers(w);
        return as_floats(step ? pairs & broadcast_integer(0xffff0000) : pairs << 16);
    }
    static Floats input(const float* x, int step) { return broadcast(x[step]); }
    static Floats multiply(Floats sum, Floats x, Floats w) { return fma(x, w, sum); }
};
#endif

template <class Format>
struct LinearProduct {
    using Number = typename Format::Number;
    static constexpr int ROWS = HAS_AVX512 ? 12 : 6;  // rows of x whose sums fit into the registers
    static constexpr int FEWER_ROWS = HAS_AVX512 ? 8 : 6;  // the same if they share lines of a cache
    const typename Format::Input* x;
    const Number *w, *b;
    Number* y;
    long N, K;

    long row_bytes() const { return K * sizeof(*x); }
    long tile_bytes() const { return K * WIDTH * sizeof(*w); }

    template <int rows, int tiles, bool prefetches_next>
    void multiply(const Block& block) const {
        const auto* const x = this->x + block.row * K;
        const Number* const w = this->w + block.output * K;
        Floats sums[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) sums[row][tile] = Floats{};
        for (long k = 0; k < K; k += Format::DEPTH) {
            UNROLL for (int tile = 0; tile < tiles; tile++) block.prefetch<prefetches_next>(w, (tile * K + k) * WIDTH);
            UNROLL for (int step = 0; step < Format::STEPS; step++)
                UNROLL for (int row = 0; row < rows; row++)
                    UNROLL for (int tile = 0; tile < tiles; tile++)
                        sums[row][tile] = Format::multiply(
                            sums[row][tile], Format::input(x + row * K + k, step),
                            Format::weight(w + (tile * K + k) * WIDTH, step));
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) finish(block, row, tile, sums[row][tile]);
    }

    // Adds the bias to the sums of one row and tile, and stores them.
    void finish(const Block& block, int row, int tile, Floats sum) const {
        const long n = block.output + tile * WIDTH;
        if (b) sum = sum + load(b + n, block.valid(tile));
        store(y + (block.row + row) * N + n, sum, block.valid(tile));
    }
};

template <class Format>
STRUCT(
    LinearArguments,
    (const typename Format::Input*, x),
    (const typename Format::Number*, w),
    (const typename Format::Number*, b),  // or null
    (typename Format::Number*, y),
    (long, M),
    (long, N),
    (long, K));

template <class Format>
void linear(const LinearArguments<Format>& args, long task, long num_tasks) {
    using Product = LinearProduct<Format>;
    const Product product = {args.x, args.w, args.b, args.y, args.N, args.K};
#ifdef HAS_AMX  // the matrix unit multiplies bfloat16 numbers in rows of some lengths
    if constexpr (std::is_same_v<typename Format::Number, BFloat16>)
        if (AmxProduct<Product>::can_multiply(product))
            return multiply_all(AmxProduct<Product>{product}, args.M, args.N, task, num_tasks);
#endif
    multiply_all(VectorProduct<Product>{product}, args.M, args.N, task, num_tasks);
}

#ifndef HAS_PAIR_PRODUCTS
// Widens the numbers of x to float32, as the product of bfloat16 numbers reads it without products of pairs.
STRUCT(WidenArguments, (const BFloat16*, x), (float*, out), (long, num_elements));

void widen(const WidenArguments& args, long task, long num_tasks) {
    const long vectors = (args.num_elements + WIDTH - 1) / WIDTH;
    for (long vector = vectors * task / num_tasks; vector < vectors * (task + 1) / num_tasks; vector++) {
        const Mask mask = first_lanes(args.num_elements - vector * WIDTH);
        store(args.out + vector * WIDTH, load(args.x + vector * WIDTH, mask), mask);
    }
}
#endif

constexpr int FLOAT32_DEPTH = Float32Format::DEPTH, BFLOAT16_DEPTH = BFloat16Format::DEPTH;

}  // namespace

EXPORT_CONSTANT(WIDTH)
EXPORT_CONSTANT(FLOAT32_DEPTH)
EXPORT_CONSTANT(BFLOAT16_DEPTH)

KERNEL(linear_float32, linear<Float32Format>)
KERNEL(linear_bfloat16, linear<BFloat16Format>)
#ifndef HAS_PAIR_PRODUCTS
KERNEL(widen_bfloat16, widen)
#endif
