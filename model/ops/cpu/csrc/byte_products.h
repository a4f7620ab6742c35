// Sums of products of bytes: unsigned weights of a few bits, and signed inputs in [-127, 127].
//
// With VNNI or NEON, four products at a time are added to a sum in 32 bits. With AVX2 alone, products are first added in 16
// bits, as many as fit there whatever the bytes are. The sums are exact either way, so they have the same bits.

#pragma once

#include "kernel.h"

#if defined(__AVX512F__) || defined(__AVXVNNI__) || defined(__aarch64__)

// NEON without i8mm multiplies signed bytes alone, so 128 is subtracted from weights of 8 bits; smaller ones fit.
#if defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_SIGNED_WEIGHTS = true;
#else
constexpr bool HAS_SIGNED_WEIGHTS = false;
#endif

// The sums of `rows` rows of inputs and `tiles` vectors of outputs, for weights of `bits` bits.
template <int bits, int rows, int tiles>
struct ByteSums {
    static constexpr bool SUBTRACTS_OFFSET = HAS_SIGNED_WEIGHTS && bits == 8;
    Integers (&sums)[rows][tiles];

    explicit ByteSums(Integers (&first)[rows][tiles]) : sums(first) {}
    static Integers prepare(Integers w) { return SUBTRACTS_OFFSET ? w ^ broadcast_integer(0x80808080) : w; }
    void add(int row, int tile, Integers w, Integers x) { sums[row][tile] = add_byte_products(sums[row][tile], w, x); }
    void end_of_vector(int) {}
};

#else

template <int bits, int rows, int tiles>
struct ByteSums {
    static constexpr bool SUBTRACTS_OFFSET = false;
    // Vectors of weights whose products fit in 16 bits: 8, 4 and 2 for 4, 5 and 6 bits.
    static constexpr int MAX_VECTORS = 0x7fff / (2 * 127 * ((1 << bits) - 1));
    Integers (&sums)[rows][tiles];
    Integers halves[rows][tiles];

    explicit ByteSums(Integers (&first)[rows][tiles]) : sums(first) {
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) halves[row][tile] = Integers{};
    }
    static Integers prepare(Integers w) { return w; }
    void add(int row, int tile, Integers w, Integers x) {
        halves[row][tile] = add_halves(halves[row][tile], multiply_bytes(w, x));
        keep_order(halves[row][tile]);
    }
    // Called after vector `index` of a group: moves the sums to 32 bits before they might not fit in 16.
    void end_of_vector(int index) {
        if ((index + 1) % MAX_VECTORS) return;
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) {
                sums[row][tile] = add_both_halves(sums[row][tile], halves[row][tile]);
                halves[row][tile] = Integers{};
            }
    }
};

// Products of 8 bits: 128 is subtracted from the weights, and the inputs get the signs of these. Then two products of
// at most 127 * 128 fit in 16 bits.
template <int rows, int tiles>
struct ByteSums<8, rows, tiles> {
    static constexpr bool SUBTRACTS_OFFSET = true;
    Integers (&sums)[rows][tiles];

    explicit ByteSums(Integers (&first)[rows][tiles]) : sums(first) {}
    static Integers prepare(Integers w) { return w ^ broadcast_integer(0x80808080); }
    void add(int row, int tile, Integers w, Integers x) {
        sums[row][tile] = add_both_halves(sums[row][tile], multiply_bytes(abs_bytes(w), copy_byte_signs(x, w)));
    }
    void end_of_vector(int) {}
};

#endif
