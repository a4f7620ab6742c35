// Reads the rows of a weight (N, K), and packs them in tiles of 16 outputs: in their own dtype (the layout is described
// in linear.cpp), or quantized to 8 or 4 bits (quantized_linear.cpp).
//
// The rows may lie anywhere, for instance in several tensors of a mapped file: `rows` has the address of each. Numbers
// are rounded to the dtype of the network first. The results are the same, to the bit, as those of `pack`,
// `quantize_int8` and `quantize_int4` in Python (model/ops/quantization.py), which explain the arithmetic.
// A task has some of the tiles.

#include <cmath>
#include <limits>
#include <type_traits>

#include "kernel.h"

namespace {

constexpr int GROUP = 32;  // k's that share a scale in int4
constexpr float SCALE_FACTORS[] = {0.76f, 0.84f, 0.92f, 1.0f, 1.12f};
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

// The upper half of each number, rounded to nearest, ties to even. Unlike the instruction of AVX512-BF16, this keeps
// subnormal numbers, as PyTorch does. NaN stays NaN.
inline Integers round_to_bfloat16(Floats a) {
    const Integers bits = as_bits(a), is_odd = bits >> 16 & broadcast_integer(1);
    return select(is_nan(a), broadcast_integer(0x7fc0), (bits + is_odd + broadcast_integer(0x7fff)) >> 16);
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
    (void*, out),
    (void*, scales),
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

// One scale for each row. K is a multiple of 4.
template <class From, class To>
void quantize_int8(const QuantizeWeightArguments<From, To>& args, long task, long num_tasks) {
    constexpr int STEP = 4 * WIDTH;
    for_each_tile(args, task, num_tasks, [&](const auto& tile, long index) {
        uint8_t* const out = static_cast<uint8_t*>(args.out) + index * WIDTH * tile.K;
        Floats divisors[WIDTH];
        for (int row = 0; row < tile.num_rows; row++) {
            Floats magnitude = Floats{};
            for (long k = 0; k < tile.K; k += WIDTH) magnitude = max(magnitude, abs(tile.numbers(row, k)));
            const float scale = reduce_max(magnitude) / 127;
            static_cast<float*>(args.scales)[index * WIDTH + row] = scale;
            divisors[row] = broadcast(std::max(scale, std::numeric_limits<float>::min()));
        }
        const Floats largest = broadcast(127), smallest = broadcast(-127);
        const Integers offset = broadcast_integer(0x80808080);  // w + 128 of a byte w is w with another highest bit
        for (long k = 0; k < tile.K; k += STEP) {
            Floats words[WIDTH];
            for (int row = 0; row < WIDTH; row++) {
                int8_t bytes[STEP];
                for (int i = 0; i < STEP && row < tile.num_rows; i += WIDTH) {
                    const Floats rounded = round(tile.numbers(row, k + i) / divisors[row]);
                    store_int8(bytes + i, to_integers(min(max(rounded, smallest), largest)), first_lanes(WIDTH));
                }
                words[row] = row < tile.num_rows ? as_floats(load_integers(bytes) ^ offset) : Floats{};
            }
            write_columns(words, (tile.K - k) / 4, reinterpret_cast<float*>(out + k * WIDTH));
        }
    });
}

inline Floats inverse(Floats scales) {
    const Mask is_tiny = is_greater(broadcast(std::numeric_limits<float>::min()), abs(scales));
    return select(is_tiny, Floats{}, broadcast(1) / scales);
}

inline Floats round_to_int4(Floats x, Floats inverse_scale) {
    return min(max(round(x * inverse_scale), broadcast(-8)), broadcast(7));
}

inline Floats round_to_float16(Floats a) {
    uint16_t halves[WIDTH];
    store_float16(halves, a);
    return load_float16(halves);
}

// The scales of a group of 16 outputs: x has the k's of the group, one vector for each.
inline Floats fit_scales(const float* x) {
    Floats magnitude = Floats{}, extreme = Floats{};
    for (int k = 0; k < GROUP; k++) {
        const Floats value = load(x + k * WIDTH);
        const Mask is_larger = is_greater(abs(value), magnitude);
        magnitude = select(is_larger, abs(value), magnitude);
        extreme = select(is_larger, value, extreme);
    }
    const Floats base = extreme / broadcast(-8);
    Floats scales = base, min_error = broadcast(INFINITY);
    for (const float factor : SCALE_FACTORS) {
        const Floats inverse_scale = inverse(base * broadcast(factor));
        Floats products = Floats{}, squares = Floats{};
        for (int first = 0; first < 8; first++) {  // in the order in which PyTorch sums 32 numbers
            Floats partial = Floats{};
            for (int k = first; k < GROUP; k += 8) {
                const Floats value = load(x + k * WIDTH), rounded = round_to_int4(value, inverse_scale);
                partial = k == first ? value * rounded : partial + value * rounded;
                squares = squares + rounded * rounded;
            }
            products = products + partial;
        }
        Floats fitted = products / max(squares, broadcast(1));
        fitted = round_to_float16(min(max(fitted, broadcast(-MAX_SCALE)), broadcast(MAX_SCALE)));
        const Floats error = (fitted * squares - broadcast(2) * products) * fitted;
        scales = select(is_greater(min_error, error), fitted, scales);
        min_error = min(error, min_error);
    }
    return scales;
}

// One scale for each row and group. K is a multiple of 32.
template <class From, class To>
void quantize_int4(const QuantizeWeightArguments<From, To>& args, long task, long num_tasks) {
    for_each_tile(args, task, num_tasks, [&](const auto& tile, long index) {
        const long num_groups = tile.K / GROUP;
        const Mask exists = first_lanes(tile.num_rows);
        for (long group = index * num_groups; group < (index + 1) * num_groups; group++) {
            float x[GROUP * WIDTH];
            const long k = (group - index * num_groups) * GROUP;
            tile.columns(k, x), tile.columns(k + WIDTH, x + WIDTH * WIDTH);
            const Floats scales = fit_scales(x), inverse_scale = inverse(scales);
            store_float16(static_cast<uint16_t*>(args.scales) + group * WIDTH, scales);
            const auto number = [&](int k) {  // w + 8
                return to_integers(round_to_int4(load(x + k * WIDTH), inverse_scale) + broadcast(8));
            };
            for (int first = 0; first < GROUP; first += 8) {
                Integers bytes = Integers{};
                for (int i = 0; i < 4; i++)
                    bytes = bytes | number(first + i) << 8 * i | number(first + 4 + i) << (8 * i + 4);
                float* const out = static_cast<float*>(args.out) + (group * GROUP + first) / 8 * WIDTH;
                store(out, select(exists, as_floats(bytes), Floats{}));
            }
        }
    });
}

}  // namespace

EXPORT_CONSTANT(WIDTH)
EXPORT_CONSTANT(GROUP)

#define KERNELS(From, from, To, to)                                     \
    KERNEL(pack_##from##_##to, pack_##to<From>)                         \
    KERNEL(quantize_int8_##from##_##to, quantize_int8<From, To>)        \
    KERNEL(quantize_int4_##from##_##to, quantize_int4<From, To>)

KERNELS(float, float32, float, float32)
KERNELS(BFloat16, bfloat16, float, float32)
KERNELS(Float16, float16, float, float32)
KERNELS(float, float32, BFloat16, bfloat16)
KERNELS(BFloat16, bfloat16, BFloat16, bfloat16)
KERNELS(Float16, float16, BFloat16, bfloat16)
