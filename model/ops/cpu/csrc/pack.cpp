// Reads the rows of a weight (N, K), and packs them in tiles of 16 outputs: in their own dtype (the layout is described
// in linear.cpp), or quantized to the formats q8_0, q5_1 and q4_1 (weight_formats.h).
//
// The rows may lie anywhere, for instance in several tensors of a mapped file: `rows` has the address of each. Numbers
// are rounded to the dtype of the network first. The results are the same, to the bit, as those of `pack`,
// `quantize_int8` and `quantize_with_minimums` in Python (model/ops/quantization.py), which explain the arithmetic.
// A task has some of the tiles.

#include <cmath>
#include <limits>
#include <type_traits>

#include "weight_formats.h"

namespace {

constexpr float RANGE_FACTORS[] = {1.0f, 0.97f, 0.94f, 0.91f, 0.88f};  // as in model/ops/quantization.py
constexpr float MAX_SCALE = 65504;  // the largest number of float16

struct Float16 {};

// How the numbers of a checkpoint are read. `Number` has their size.
template <class Dtype>
struct Source {
    using Number = Dtype;
    static Floats read(const Number* from, long count) { return load(from, first_lanes(count)); }
};

template <>
struct Source<Float16> {
    using Number = uint16_t;
    static Floats read(const uint16_t* from, long count) {
        if (count >= WIDTH) return load_float16(from);
        uint16_t all[WIDTH] = {};
        std::memcpy(all, from, std::max(count, 0L) * sizeof *from);
        return load_float16(all);
    }
};

// Unlike the instruction of AVX512-BF16, this keeps subnormal numbers, as PyTorch does. Any NaN stays NaN.
inline Integers round_to_bfloat16(Floats a) {
    return select(is_nan(a), broadcast_integer(0x7fc0), to_bfloat16(a));
}

// The rows of a tile of 16 outputs, of which `num_rows` exist. `From` is the dtype of the checkpoint, `To` that of the
// network.
template <class From, class To>
struct Tile {
    using Number = typename Source<From>::Number;
    const Number* const* rows;
    long num_rows, K;

    // Up to 16 numbers of a row from k on, rounded to `To`; 0 beyond the end of the row.
    Floats numbers(long row, long k) const {
        if (row >= num_rows) return Floats{};
        const Floats wide = Source<From>::read(rows[row] + k, K - k);
        if constexpr (std::is_same_v<To, BFloat16> && !std::is_same_v<From, BFloat16>)
            return as_floats(round_to_bfloat16(wide) << 16);
        else
            return wide;
    }

    // 16 k's of all rows: vector i has k + i of each row.
    void columns(long k, float* to) const {
        Floats by_row[WIDTH];
        for (int row = 0; row < WIDTH; row++) by_row[row] = numbers(row, k);
        transpose(by_row, to);
    }
};

// The N rows of K numbers each to be packed, by address.
template <class From, class To>
STRUCT(
    PackArguments,
    (const typename Source<From>::Number* const*, rows),
    (void*, out),
    (long, N),
    (long, K));

template <class From, class To>
STRUCT(
    QuantizeWeightArguments,
    (const typename Source<From>::Number* const*, rows),
    (float*, integers),
    (uint16_t*, scales),
    (long, N),
    (long, K));

// Calls `pack_tile(tile, index)` for each tile of this task.
template <class From, class To, template <class, class> class Arguments, class PackTile>
void for_each_tile(const Arguments<From, To>& args, long task, long num_tasks, PackTile pack_tile) {
    const long N = args.N, K = args.K, num_tiles = (N + WIDTH - 1) / WIDTH;
    for (long index = num_tiles * task / num_tasks; index < num_tiles * (task + 1) / num_tasks; index++)
        pack_tile(Tile<From, To>{args.rows + index * WIDTH, std::min(N - index * WIDTH, long{WIDTH}), K}, index);
}

// Writes the first `count` of 16 columns of words: word i of every row, for i = 0, 1, ...
inline void write_columns(Floats (&words)[WIDTH], long count, float* to) {
    if (count >= WIDTH) return transpose(words, to);
    float all[WIDTH * WIDTH];
    transpose(words, all);
    std::memcpy(to, all, count * WIDTH * sizeof *to);
}

// In float32: a word is a number.
template <class From>
void pack_float32(const PackArguments<From, float>& args, long task, long num_tasks) {
    for_each_tile(args, task, num_tasks, [&](const auto& tile, long index) {
        float* const out = static_cast<float*>(args.out) + index * WIDTH * tile.K;
        for (long k = 0; k < tile.K; k += WIDTH) {
            Floats words[WIDTH];
            for (int row = 0; row < WIDTH; row++) words[row] = tile.numbers(row, k);
            write_columns(words, tile.K - k, out + k * WIDTH);
        }
    });
}

// In bfloat16: a word is a pair of numbers. K is even.
template <class From>
void pack_bfloat16(const PackArguments<From, BFloat16>& args, long task, long num_tasks) {
    constexpr int STEP = 2 * WIDTH;
    for_each_tile(args, task, num_tasks, [&](const auto& tile, long index) {
        float* const out = static_cast<float*>(args.out) + index * WIDTH * tile.K / 2;
        for (long k = 0; k < tile.K; k += STEP) {
            Floats words[WIDTH];
            for (int row = 0; row < WIDTH; row++) {
                if (std::is_same_v<From, BFloat16> && row < tile.num_rows && tile.K - k >= STEP) {
                    words[row] = load(reinterpret_cast<const float*>(tile.rows[row] + k));
                    continue;
                }
                BFloat16 pairs[STEP];
                for (int half = 0; half < STEP; half += WIDTH)
                    store_uint16(pairs + half, as_bits(tile.numbers(row, k + half)) >> 16);
                words[row] = load(reinterpret_cast<const float*>(pairs));
            }
            write_columns(words, (tile.K - k) / 2, out + k / 2 * WIDTH);
        }
    });
}

inline Floats as_finite(Floats a) { return min(max(a, broadcast(-MAX_SCALE)), broadcast(MAX_SCALE)); }

inline Floats as_stored(Floats scales) {
    uint16_t halves[WIDTH];
    store_float16(halves, as_finite(scales));
    return load_float16(halves);
}

inline Floats inverse(Floats scales) {
    const Mask is_tiny = is_greater(broadcast(std::numeric_limits<float>::min()), abs(scales));
    return select(is_tiny, Floats{}, broadcast(1) / scales);
}

// A group of 16 outputs: number(k) has k of each.
using Group = float[GROUP * WIDTH];
inline Floats number(const Group& x, int k) { return load(x + k * WIDTH); }

// The outputs of which all numbers of a group are finite. The other outputs are set to zero.
inline Mask clear_non_finite(Group& x) {
    Mask finite = first_lanes(WIDTH);
    for (int k = 0; k < GROUP; k++) finite = finite & is_greater(broadcast(INFINITY), abs(number(x, k)));
    if (count_lanes(finite) < WIDTH)
        for (int k = 0; k < GROUP; k++) store(x + k * WIDTH, select(finite, number(x, k), Floats{}));
    return finite;
}

// Calls `quantize(x, group, exists, finite)` for each group of each tile. Groups are numbered across the tiles, and
// numbers beyond K are zeros. Lanes in `exists` are outputs below N. An output of which a number is not finite is not in
// `finite`: its scales become NaN.
template <class From, class To, class Quantize>
void for_each_group(const QuantizeWeightArguments<From, To>& args, long task, long num_tasks, Quantize quantize) {
    for_each_tile(args, task, num_tasks, [&](const auto& tile, long index) {
        const long num_groups = (tile.K + GROUP - 1) / GROUP;
        for (long group = 0; group < num_groups; group++) {
            Group x;
            tile.columns(group * GROUP, x), tile.columns(group * GROUP + WIDTH, x + WIDTH * WIDTH);
            const Mask finite = clear_non_finite(x);
            quantize(x, index * num_groups + group, first_lanes(tile.num_rows), finite);
        }
    });
}

// One scale for each row and group. Rows beyond N are zero bytes, as if from a scale of 0.
template <class From, class To>
void quantize_q8_0(const QuantizeWeightArguments<From, To>& args, long task, long num_tasks) {
    for_each_group(args, task, num_tasks, [&](const Group& x, long group, Mask exists, Mask finite) {
        Floats magnitude = Floats{};
        for (int k = 0; k < GROUP; k++) magnitude = max(magnitude, abs(number(x, k)));
        const Floats scales = as_stored(magnitude / broadcast(127)), factor = inverse(scales);
        store_float16(args.scales + group * WIDTH, select(finite, scales, broadcast(NAN)));
        const auto integer = [&](int k) {
            const Floats rounded = min(max(round(number(x, k) * factor), broadcast(-127)), broadcast(127));
            return to_integers(rounded + broadcast(128));
        };
        for (int first = 0; first < GROUP; first += 4) {
            Integers bytes = Integers{};
            for (int i = 0; i < 4; i++) bytes = bytes | integer(first + i) << 8 * i;
            float* const out = args.integers + (group * GROUP + first) / 4 * WIDTH;
            store(out, select(exists, as_floats(bytes), Floats{}));
        }
    });
}

// How a group is stored: as `scale` times an integer minus `minimum`.
struct Fit {
    Floats scale, minimum;
};

// To an unsigned integer of `bits` bits.
template <int bits>
inline Floats round_to_bits(Floats x, Floats minimum, Floats factor) {
    return min(max(round((x + minimum) * factor), Floats{}), broadcast((1 << bits) - 1));
}

// The sum of term(k) for all k of a group, in the order of `_sum` in quantization.py.
template <class Term>
inline Floats sum_of_group(Term term) {
    Floats total;
    for (int first = 0; first < 8; first++) {
        Floats partial = term(first);
        for (int k = first + 8; k < GROUP; k += 8) partial = partial + term(k);
        total = first == 0 ? partial : total + partial;
    }
    return total;
}

// The scale and minimum with which these integers have the smallest squared error.
inline Fit least_squares(const Group& x, const Group& integers, Floats sum_x) {
    const Floats size = broadcast(GROUP), one = broadcast(1);
    const Floats sum_q = sum_of_group([&](int k) { return number(integers, k); });
    const Floats sum_qq = sum_of_group([&](int k) { return number(integers, k) * number(integers, k); });
    const Floats sum_xq = sum_of_group([&](int k) { return number(x, k) * number(integers, k); });
    const Floats determinant = sum_qq * size - sum_q * sum_q;
    const Mask is_flat = is_equal(determinant, Floats{});
    const Floats scale = (sum_xq * size - sum_q * sum_x) / select(is_flat, one, determinant);
    const Floats stored = as_stored(select(is_flat, Floats{}, scale));
    return {stored, as_stored((stored * sum_q - sum_x) * broadcast(1.0f / GROUP))};
}

// The best of several fits.
template <int bits>
inline Fit fit_group(const Group& x) {
    Floats smallest = number(x, 0), largest = smallest;
    for (int k = 1; k < GROUP; k++) smallest = min(smallest, number(x, k)), largest = max(largest, number(x, k));
    const Floats half = broadcast(0.5f), step = broadcast(2.0f / ((1 << bits) - 1));
    const Floats half_range = largest * half - smallest * half, middle = largest * half + smallest * half;
    const Floats sum_x = sum_of_group([&](int k) { return number(x, k); });
    Fit best = {as_stored(half_range * step), as_stored(broadcast(0) - smallest)};
    Floats min_error = broadcast(INFINITY);
    for (const float range_factor : RANGE_FACTORS) {
        const Floats range = half_range * broadcast(range_factor);
        const Floats minimum = as_finite(range - middle), factor = inverse(as_finite(range * step));
        Group integers;
        for (int k = 0; k < GROUP; k++) store(integers + k * WIDTH, round_to_bits<bits>(number(x, k), minimum, factor));
        const Fit fitted = least_squares(x, integers, sum_x);
        const Floats error = sum_of_group([&](int k) {
            const Floats difference = number(integers, k) * fitted.scale - fitted.minimum - number(x, k);
            return difference * difference;
        });
        const Mask is_better = is_greater(min_error, error);
        best = {select(is_better, fitted.scale, best.scale), select(is_better, fitted.minimum, best.minimum)};
        min_error = select(is_better, error, min_error);
    }
    return best;
}

// A scale and a minimum for each row and group, and integers of 4 or 5 bits. Rows beyond N are zeros.
template <int bits, class From, class To>
void quantize_with_minimums(const QuantizeWeightArguments<From, To>& args, long task, long num_tasks) {
    static_assert(bits == 4 || bits == 5);
    for_each_group(args, task, num_tasks, [&](const Group& x, long group, Mask exists, Mask finite) {
        const Fit fit = fit_group<bits>(x);
        const Floats factor = inverse(fit.scale);
        uint16_t* const scales = args.scales + group * 2 * WIDTH;
        store_float16(scales, select(finite, fit.scale, broadcast(NAN)));
        store_float16(scales + WIDTH, select(finite, select(exists, fit.minimum, Floats{}), broadcast(NAN)));
        float* const out = args.integers + group * bits * WIDTH;
        const auto write = [&](int line, Integers bytes) {
            store(out + line * WIDTH, select(exists, as_floats(bytes), Floats{}));
        };
        Integers upper = Integers{};  // bit 4 of vector j in bit j
        for (int j = 0; j < GROUP / 4; j += 2) {
            Integers vectors[2] = {Integers{}, Integers{}};
            for (int k = 0; k < 8; k++) {
                const Floats integer = round_to_bits<bits>(number(x, 4 * j + k), fit.minimum, factor);
                vectors[k / 4] = vectors[k / 4] | to_integers(integer) << 8 * (k % 4);
            }
            const Integers low_half = broadcast_integer(0x0f0f0f0f), bit_0 = broadcast_integer(0x01010101);
            write(j / 2, (vectors[0] & low_half) | (vectors[1] & low_half) << 4);
            for (int i = 0; i < 2; i++) upper = upper | (vectors[i] >> 4 & bit_0) << (j + i);
        }
        if constexpr (bits == 5) write(4, upper);
    });
}

}  // namespace

EXPORT_CONSTANT(WIDTH)
EXPORT_CONSTANT(GROUP)

#define KERNELS(From, from, To, to)                                           \
    KERNEL(pack_##from##_##to, pack_##to<From>)                               \
    KERNEL(quantize_q8_0_##from##_##to, quantize_q8_0<From, To>)              \
    KERNEL(quantize_q5_1_##from##_##to, quantize_with_minimums<5, From, To>)  \
    KERNEL(quantize_q4_1_##from##_##to, quantize_with_minimums<4, From, To>)

KERNELS(float, float32, float, float32)
KERNELS(BFloat16, bfloat16, float, float32)
KERNELS(Float16, float16, float, float32)
KERNELS(float, float32, BFloat16, bfloat16)
KERNELS(BFloat16, bfloat16, BFloat16, bfloat16)
KERNELS(Float16, float16, BFloat16, bfloat16)
