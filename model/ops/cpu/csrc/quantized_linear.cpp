// Linear layers with weights of 8 or 4 bits: y = x w^T + b, by products of bytes (VNNI, or AMX where there is one).
//
// First, `quantize` rounds each row of x to bytes in [-127, 127] with a scale of its own. Then `linear` multiplies the
// bytes by the weights. The instructions multiply unsigned by signed bytes, so the weights are stored unsigned: w + 128
// in int8, w + 8 in int4. The surplus has to be subtracted: 128 times the sum of the row's bytes in int8, 8 times the sum of
// each group's bytes in int4. So `quantize` also computes these sums, times -128 or -8. Weights are packed in tiles of 16 outputs:
//   int8: [N / 16][K / 4][16][4] bytes w + 128, and one float32 scale per output.
//   int4: [N / 16][K / 32][4][16][4] bytes, and one float16 scale per output and group of 32 k's, [N / 16][K / 32][16].
//         Of a group's k's, byte [j][output][i] holds w + 8 of k = 8 j + i in its low half, and of k = 8 j + 4 + i in
//         its high half.
// A task has some rows in `quantize`, and some tiles for all rows in `linear` (gemm.h).
//
// Sums of products of integers are exact. The float32 operations on them have one order, whatever M is. So no bit of a
// row's result depends on the other rows.

#include <cmath>

#include "amx.h"
#include "kernel.h"
#include "gemm.h"

namespace {

constexpr int GROUP = 32;  // k's that share a scale in int4

// Rounds x (M, K) to bytes (M, K), with a scale (M) for each row. Also sums the bytes of each `group` k's, times
// `offset`: (M, K / group).
template <class Number>
STRUCT(
    QuantizeArguments,
    (const Number*, x),
    (int8_t*, bytes),
    (float*, scales),
    (int32_t*, offset_sums),
    (long, M),
    (long, K),
    (long, group),
    (long, offset));

template <class Number>
void quantize(const QuantizeArguments<Number>& args, long task, long num_tasks) {
    const long M = args.M, K = args.K, group = args.group, offset = args.offset;
    for (long row = M * task / num_tasks; row < M * (task + 1) / num_tasks; row++) {
        const Number* from = args.x + row * K;
        int8_t* to = args.bytes + row * K;
        int32_t* sums = args.offset_sums + row * (K / group);
        Floats magnitude = Floats{};
        Mask is_nan_lane = {};
        for (long k = 0; k < K; k += WIDTH) {
            const Floats value = load(from + k, first_lanes(K - k));
            magnitude = max(magnitude, abs(value));
            is_nan_lane = is_nan_lane | is_nan(value);
        }
        const float max_abs = count_lanes(is_nan_lane) ? NAN : reduce_max(magnitude);
        args.scales[row] = max_abs / 127;
        const Floats factor = broadcast(max_abs > 0 ? 127 / max_abs : 0);
        for (long k = 0; k < K; k += WIDTH) {
            const Mask mask = first_lanes(K - k);
            store_int8(to + k, to_integers(load(from + k, mask) * factor), mask);
        }
        for (long k = 0; k < K; k += group) {
            int32_t sum = 0;
            for (long i = k; i < k + group; i++) sum += to[i];
            sums[k / group] = sum * static_cast<int32_t>(offset);
        }
    }
}

// The same four bytes of x in each lane.
Integers broadcast_four(const int8_t* x) {
    uint32_t four;
    std::memcpy(&four, x, sizeof four);
    return broadcast_integer(four);
}

// What products with weights of 8 and of 4 bits share.
template <class Number>
struct QuantizedProduct {
    const int8_t* x;
    const float* x_scales;
    const int32_t* offset_sums;  // `offset` (-128 or -8) times the sums of the bytes of x
    const uint8_t* w;
    const Number* b;
    Number* y;
    long N, K;

    // Scales the sums of one row and tile by the row's scale, adds the bias and stores them.
    void finish(const Block& block, int row, int tile, Floats sum) const {
        const long n = block.output + tile * WIDTH;
        sum = sum * broadcast(x_scales[block.row + row]);
        if (b) sum = sum + load(b + n, block.valid(tile));
        store(y + (block.row + row) * N + n, sum, block.valid(tile));
    }
};

template <class Number>
struct Int8Product : QuantizedProduct<Number> {
    static constexpr int ROWS = HAS_AVX512 ? 12 : 4;  // rows of x whose sums fit into the registers
    const float* scales;

    long row_bytes() const { return this->K; }
    long tile_bytes() const { return this->K * WIDTH; }

    template <int rows, int tiles, bool prefetches_next>
    void multiply(const Block& block) const {
        const long K = this->K;
        const int8_t* x = this->x + block.row * K;
        const uint8_t* w = this->w + block.output * K;
        Integers sums[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++)
                sums[row][tile] = Integers{};
        for (long k = 0; k < K; k += 4) {
            UNROLL for (int tile = 0; tile < tiles; tile++) block.prefetch<prefetches_next>(w, (tile * K + k) * WIDTH);
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++)
                    sums[row][tile] = add_byte_products(
                        sums[row][tile], load_integers(w + (tile * K + k) * WIDTH), broadcast_four(x + row * K + k));
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) finish(block, row, tile, sums[row][tile]);
    }

    void finish(const Block& block, int row, int tile, Integers sum) const {
        const Floats scale = load(scales + block.output + tile * WIDTH, block.valid(tile));
        sum = sum + broadcast_integer(this->offset_sums[block.row + row]);
        QuantizedProduct<Number>::finish(block, row, tile, to_floats(sum) * scale);
    }
};

template <class Number>
struct Int4Product : QuantizedProduct<Number> {
    static constexpr int ROWS = HAS_AVX512 ? 6 : 2;  // rows of x whose two kinds of sums fit into the registers
    const uint16_t* scales;

    long tile_bytes() const { return this->K * WIDTH / 2; }

    template <int rows, int tiles, bool prefetches_next>
    void multiply(const Block& block) const {
        const long K = this->K, num_groups = K / GROUP;
        const int8_t* x = this->x + block.row * K;
        const uint8_t* w = this->w + block.output * K / 2;
        const Integers low_halves = broadcast_integer(0x0f0f0f0f);
        Floats totals[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) totals[row][tile] = Floats{};
        for (long group = 0; group < num_groups; group++) {
            Integers sums[rows][tiles];
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++)
                    sums[row][tile] = broadcast_integer(this->offset_sums[(block.row + row) * num_groups + group]);
            for (int first_k = 0; first_k < GROUP; first_k += 8)
                UNROLL for (int tile = 0; tile < tiles; tile++) {
                    const long offset = (tile * K + group * GROUP + first_k) / 2 * WIDTH;
                    block.prefetch<prefetches_next>(w, offset);
                    const Integers both = load_integers(w + offset);
                    const Integers first = both & low_halves;
                    const Integers second = both >> 4 & low_halves;
                    UNROLL for (int row = 0; row < rows; row++) {
                        const int8_t* four = x + row * K + group * GROUP + first_k;
                        sums[row][tile] = add_byte_products(sums[row][tile], first, broadcast_four(four));
                        sums[row][tile] = add_byte_products(sums[row][tile], second, broadcast_four(four + 4));
                    }
                }
            UNROLL for (int tile = 0; tile < tiles; tile++) {
                const long at_scale = ((block.output / WIDTH + tile) * num_groups + group) * WIDTH;
                const Floats scale = load_float16(scales + at_scale);
                UNROLL for (int row = 0; row < rows; row++)
                    totals[row][tile] = fma(to_floats(sums[row][tile]), scale, totals[row][tile]);
            }
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) this->finish(block, row, tile, totals[row][tile]);
    }
};

// y = x w^T + b, where `quantize` wrote x_bytes, x_scales and offset_sums.
template <class Number, class Scale>
STRUCT(
    QuantizedLinearArguments,
    (const int8_t*, x_bytes),
    (const float*, x_scales),
    (const int32_t*, offset_sums),
    (const uint8_t*, w),
    (const Scale*, w_scales),
    (const Number*, b),  // or null
    (Number*, y),
    (long, M),
    (long, N),
    (long, K));

template <template <class> class Product, class Number, class Scale>
void linear(const QuantizedLinearArguments<Number, Scale>& args, long task, long num_tasks) {
    const Product<Number> product = {
        {args.x_bytes, args.x_scales, args.offset_sums, args.w, args.b, args.y, args.N, args.K},
        args.w_scales,
    };
    constexpr bool is_packed_for_amx = std::is_same_v<Product<Number>, Int8Product<Number>>;
    multiply_by_best_unit<is_packed_for_amx>(product, args.M, args.N, task, num_tasks);
}

}  // namespace

EXPORT_CONSTANT(WIDTH)
EXPORT_CONSTANT(GROUP)

#define KERNELS(Number, dtype)                                             \
    KERNEL(quantize_##dtype, quantize<Number>)                             \
    KERNEL(linear_int8_##dtype, linear<Int8Product, Number, float>)        \
    KERNEL(linear_int4_##dtype, linear<Int4Product, Number, uint16_t>)

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
