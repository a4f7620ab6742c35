// How quantized weights lie in memory: for each format, how a group of weights is unpacked and scaled.
//
// A weight (N, K) is packed in tiles of 16 outputs. K is divided into groups of 32 inputs; the last one is padded with
// weights that count as 0. A number of the matrix is `scale * (w - OFFSET)`, or `scale * w - minimum`, where w is an
// unsigned integer of BITS bits.
//
// The integers of a tile: [group][64 * BITS] bytes. As bytes, a group is [8][16][4]: vector j has inputs 4 j to 4 j + 3
// of each output. In fewer bits, byte p of 4 has vector 2 p in the low halves of its bytes, and vector 2 p + 1 in the
// high halves. After these 256 bytes, 5 bits have 64 bytes with bit 4 of vector j in bit j; 6 bits have 2 times 64
// bytes, of which number j / 4 has bits 4 and 5 of vector j in the bits from 2 (j % 4) on.
//
// The scales of a tile lie in an array of their own, described with each kind of scale below.

#pragma once

#include "kernel.h"

constexpr int GROUP = 32;          // inputs that share a scale: as in model/ops/cpu/weight_formats.py
constexpr int SUPERGROUP = 8;      // groups that share a float16 scale in formats with scales of 6 or 8 bits
constexpr int VECTORS_PER_GROUP = GROUP / 4;

// Unsigned integers of 4, 5, 6 or 8 bits.
template <int bits>
struct PackedIntegers {
    static constexpr int BITS = bits;
    static constexpr long GROUP_BYTES = GROUP * WIDTH * BITS / 8;

    // Vectors 2 `pair` and 2 `pair` + 1 of a group, one byte for each integer.
    static void unpack(const uint8_t* group, int pair, Integers (&vectors)[2]) {
        constexpr long BYTES = 4 * WIDTH;  // of a vector
        if constexpr (BITS == 8) {
            vectors[0] = load_integers(group + 2 * pair * BYTES);
            vectors[1] = load_integers(group + (2 * pair + 1) * BYTES);
            return;
        }
        const Integers both = load_integers(group + pair * BYTES), low_half = broadcast_integer(0x0f0f0f0f);
        vectors[0] = both & low_half;
        vectors[1] = both >> 4 & low_half;
        if constexpr (BITS == 5) {
            const Integers bit_4 = broadcast_integer(0x10101010), upper = load_integers(group + 4 * BYTES);
            for (int i = 0; i < 2; i++) {
                const int from = 2 * pair + i;
                vectors[i] = vectors[i] | ((from < 4 ? upper << (4 - from) : upper >> (from - 4)) & bit_4);
            }
        }
        if constexpr (BITS == 6) {
            const Integers bits_4_5 = broadcast_integer(0x30303030);
            const Integers upper = load_integers(group + (4 + pair / 2) * BYTES);
            for (int i = 0; i < 2; i++) {
                const int from = 2 * (2 * pair + i) % 8;
                vectors[i] = vectors[i] | ((from < 4 ? upper << (4 - from) : upper >> (from - 4)) & bits_4_5);
            }
        }
    }
};

// One float16 scale for each output and group: [group][16].
struct GroupScale {
    static constexpr bool HAS_MINIMUM = false;
    static constexpr int PARTS = 1;  // parts of a group that have scales of their own

    static long bytes(long num_groups) { return num_groups * WIDTH * 2; }
    static GroupScale load(const uint8_t* tile, long group) {
        return {load_float16((const uint16_t*)tile + group * WIDTH)};
    }

    Floats scale;
    Floats of_part(int) const { return scale; }
};

// What all kinds with a scale and a minimum of each group have.
struct ScaleAndMinimum {
    static constexpr bool HAS_MINIMUM = true;
    static constexpr int PARTS = 1;

    Floats scale, minimum;
    Floats of_part(int) const { return scale; }
};

// A float16 scale and a float16 minimum for each output and group: [group][2][16].
struct GroupScaleAndMinimum : ScaleAndMinimum {
    static long bytes(long num_groups) { return num_groups * WIDTH * 4; }
    static GroupScaleAndMinimum load(const uint8_t* tile, long group) {
        const uint16_t* const at_group = (const uint16_t*)tile + group * 2 * WIDTH;
        return {{load_float16(at_group), load_float16(at_group + WIDTH)}};
    }
};

// For each output and supergroup, float16 factors of scales and of minimums; for each group, a scale and a minimum as
// bytes: [supergroup]{[2][16] float16, [8][2][16] bytes}.
struct ByteScaleAndMinimum : ScaleAndMinimum {
    static constexpr long SUPERGROUP_BYTES = 2 * WIDTH * 2 + SUPERGROUP * 2 * WIDTH;

    static long bytes(long num_groups) { return num_groups / SUPERGROUP * SUPERGROUP_BYTES; }
    static ByteScaleAndMinimum load(const uint8_t* tile, long group) {
        const uint8_t* const factors = tile + group / SUPERGROUP * SUPERGROUP_BYTES;
        const uint8_t* const scales = factors + 2 * WIDTH * 2 + group % SUPERGROUP * 2 * WIDTH;
        return {{load_float16((const uint16_t*)factors) * to_floats(load_uint8(scales)),
                 load_float16((const uint16_t*)factors + WIDTH) * to_floats(load_uint8(scales + WIDTH))}};
    }
};

// For each output, float16 factors of all its scales and of all its minimums; for each group, a scale and a minimum as
// bytes: {[2][16] float16, [group][2][16] bytes}.
struct RowScaleAndMinimum : ScaleAndMinimum {
    static constexpr long FACTOR_BYTES = 2 * WIDTH * 2;

    static long bytes(long num_groups) { return FACTOR_BYTES + num_groups * 2 * WIDTH; }
    static RowScaleAndMinimum load(const uint8_t* tile, long group) {
        const uint16_t* const factors = (const uint16_t*)tile;
        const uint8_t* const scales = tile + FACTOR_BYTES + group * 2 * WIDTH;
        return {{load_float16(factors) * to_floats(load_uint8(scales)),
                 load_float16(factors + WIDTH) * to_floats(load_uint8(scales + WIDTH))}};
    }
};

// For each output and supergroup, a float16 factor; for each half of a group, a scale as a signed byte:
// [supergroup]{[16] float16, [8][2][16] bytes}.
struct HalfGroupScale {
    static constexpr bool HAS_MINIMUM = false;
    static constexpr int PARTS = 2;
    static constexpr long SUPERGROUP_BYTES = WIDTH * 2 + SUPERGROUP * 2 * WIDTH;

    static long bytes(long num_groups) { return num_groups / SUPERGROUP * SUPERGROUP_BYTES; }
    static HalfGroupScale load(const uint8_t* tile, long group) {
        const uint8_t* const factors = tile + group / SUPERGROUP * SUPERGROUP_BYTES;
        const int8_t* const scales = (const int8_t*)factors + WIDTH * 2 + group % SUPERGROUP * 2 * WIDTH;
        const Floats factor = load_float16((const uint16_t*)factors);
        return {{factor * to_floats(load_int8(scales)), factor * to_floats(load_int8(scales + WIDTH))}};
    }

    Floats scales[2];
    Floats of_part(int part) const { return scales[part]; }
};

// A format: integers of some bits, and a kind of scale. Integers without a minimum have an offset: the middle of their
// range.
template <int bits, class ScaleKind>
struct WeightFormat : PackedIntegers<bits> {
    using Scale = ScaleKind;
    static constexpr int OFFSET_SHIFT = bits - 1;  // the offset is 2^OFFSET_SHIFT
};
