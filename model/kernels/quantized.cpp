// y = x w^T + b with weights of 8 or 4 bits, by products of bytes, which VNNI adds up at once, and AMX those of a tile.
//
// Each row of x is rounded to bytes in [-127, 127] with a scale of its own; sums of products of integers are exact, so
// a row's result does not depend on the rows beside it. Weights are unsigned bytes: 128, or 8, is subtracted by way of
// the sum of the row's bytes. Packed in tiles of 16 outputs:
//   int8: [N / 16][K / 4][16][4] bytes w + 128, one scale an output.
//   int4: [N / 16][K / 32][4][16][4] bytes. Of the 32 k's of a group, byte [j][output][i] holds w + 8 of k = 8 j + i in
//         its low half, of k = 8 j + 4 + i in its high half; one float16 scale a group and output.

#include <cmath>

#include "amx.h"
#include "kernel.h"
#include "tiles.h"

namespace {

constexpr int GROUP = 32;  // k's that share a scale in int4

// x (M, K) -> bytes (M, K), scale (M) of each row, and the sum of the bytes of each `group` k's (M, K / group), times
// `offset`.
template <class Number>
void quantize(Arguments given, long part, long num_parts) {
    const Number* x = given.array<Number>(0);
    const long M = given.size(4), K = given.size(5), group = given.size(6), offset = given.size(7);
    for (long row = M * part / num_parts; row < M * (part + 1) / num_parts; row++) {
        const Number* from = x + row * K;
        int8_t* to = given.array<int8_t>(1) + row * K;
        int32_t* sums = given.array<int32_t>(3) + row * (K / group);
        Floats largest = Floats{};
        Mask unordered = {};
        for (long k = 0; k < K; k += WIDTH) {
            const Floats value = load(from + k, first_of(K - k));
            largest = max(largest, abs(value));
            unordered = unordered | is_nan(value);
        }
        const float most = count_of(unordered) ? NAN : most_of(largest);
        given.array<float>(2)[row] = most / 127;
        const Floats factor = set(most > 0 ? 127 / most : 0);
        for (long k = 0; k < K; k += WIDTH) {
            const Mask which = first_of(K - k);
            store_bytes(to + k, to_integers(load(from + k, which) * factor), which);
        }
        for (long k = 0; k < K; k += group) {
            int32_t sum = 0;
            for (long i = k; i < k + group; i++) sum += to[i];
            sums[k / group] = sum * static_cast<int32_t>(offset);
        }
    }
}

// The same four bytes of x for each output.
Integers load_four(const int8_t* x) {
    uint32_t four;
    std::memcpy(&four, x, sizeof four);
    return set_integer(four);
}

template <class Number>
struct Quantized {
    const int8_t* x;
    const float* x_scales;
    const int32_t* sums;
    const uint8_t* w;
    const Number* b;
    Number* y;
    long N, K;

    // The sums of one row and tile, in units of the weight's scale.
    void finish(const Tiles& at, int row, int tile, Floats sum) const {
        const long n = at.output + tile * WIDTH;
        sum = sum * set(x_scales[at.row + row]);
        if (b) sum = sum + load(b + n, at.kept(tile));
        store(y + (at.row + row) * N + n, sum, at.kept(tile));
    }
};

template <class Number>
struct Int8 : Quantized<Number> {
    static constexpr int ROWS = IS_WIDE ? 12 : 4;
    const float* scales;

    long row_bytes() const { return this->K; }
    long tile_bytes() const { return this->K * WIDTH; }

    template <int rows, int tiles, bool of_next>
    void multiply(const Tiles& at) const {
        const long K = this->K;
        const int8_t* x = this->x + at.row * K;
        const uint8_t* w = this->w + at.output * K;
        Integers sums[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++)
                sums[row][tile] = Integers{};
        for (long k = 0; k < K; k += 4) {
            UNROLL for (int tile = 0; tile < tiles; tile++) at.fetch<of_next>(w, (tile * K + k) * WIDTH);
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++)
                    sums[row][tile] = add_products(
                        sums[row][tile], load_integers(w + (tile * K + k) * WIDTH), load_four(x + row * K + k));
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) finish(at, row, tile, sums[row][tile]);
    }

    void finish(const Tiles& at, int row, int tile, Integers sum) const {
        const Floats scale = load(scales + at.output + tile * WIDTH, at.kept(tile));
        sum = sum + set_integer(this->sums[at.row + row]);
        Quantized<Number>::finish(at, row, tile, to_floats(sum) * scale);
    }
};

template <class Number>
struct Int4 : Quantized<Number> {
    static constexpr int ROWS = IS_WIDE ? 6 : 2;
    const uint16_t* scales;

    long tile_bytes() const { return this->K * WIDTH / 2; }

    template <int rows, int tiles, bool of_next>
    void multiply(const Tiles& at) const {
        const long K = this->K, num_groups = K / GROUP;
        const int8_t* x = this->x + at.row * K;
        const uint8_t* w = this->w + at.output * K / 2;
        const Integers low = set_integer(0x0f0f0f0f);
        Floats totals[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) totals[row][tile] = Floats{};
        for (long group = 0; group < num_groups; group++) {
            Integers sums[rows][tiles];
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++)
                    sums[row][tile] = set_integer(this->sums[(at.row + row) * num_groups + group]);
            for (int eight = 0; eight < GROUP; eight += 8)
                UNROLL for (int tile = 0; tile < tiles; tile++) {
                    const long offset = (tile * K + group * GROUP + eight) / 2 * WIDTH;
                    at.fetch<of_next>(w, offset);
                    const Integers both = load_integers(w + offset);
                    const Integers first = both & low;
                    const Integers second = both >> 4 & low;
                    UNROLL for (int row = 0; row < rows; row++) {
                        const int8_t* four = x + row * K + group * GROUP + eight;
                        sums[row][tile] = add_products(sums[row][tile], first, load_four(four));
                        sums[row][tile] = add_products(sums[row][tile], second, load_four(four + 4));
                    }
                }
            UNROLL for (int tile = 0; tile < tiles; tile++) {
                const long at_scale = ((at.output / WIDTH + tile) * num_groups + group) * WIDTH;
                const Floats scale = load_float16(scales + at_scale);
                UNROLL for (int row = 0; row < rows; row++)
                    totals[row][tile] = fma(to_floats(sums[row][tile]), scale, totals[row][tile]);
            }
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) this->finish(at, row, tile, totals[row][tile]);
    }
};

template <template <class> class Product, class Number, class Scale>
void linear(Arguments given, long part, long num_parts) {
    const long M = given.size(7), N = given.size(8), K = given.size(9);
    const Product<Number> product = {
        {given.array<int8_t>(0), given.array<float>(1), given.array<int32_t>(2), given.array<uint8_t>(3),
         given.array<Number>(5), given.array<Number>(6), N, K},
        given.array<Scale>(4),
    };
    multiply_by_best<std::is_same_v<Product<Number>, Int8<Number>>>(product, M, N, part, num_parts);
}

}  // namespace

#define KERNELS(Number, dtype)                                                                      \
    KERNEL(quantize_##dtype) { quantize<Number>(given, part, num_parts); }                          \
    KERNEL(linear_int8_##dtype) { linear<Int8, Number, float>(given, part, num_parts); }            \
    KERNEL(linear_int4_##dtype) { linear<Int4, Number, uint16_t>(given, part, num_parts); }

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
