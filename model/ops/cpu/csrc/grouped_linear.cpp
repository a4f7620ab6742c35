// Linear layers with weights of 4 to 8 bits in groups of 32 inputs: y = x w^T + b, by products of bytes.
//
// First, `quantize_groups` rounds each group of 32 numbers of a row of x to bytes in [-127, 127] with a scale of its own.
// Then `linear` multiplies the bytes by the weights (formats: weight_formats.h). The instructions multiply unsigned by
// signed bytes, so the integers of the weights are unsigned; what they are too large by is subtracted with the help of
// the sum of each group's bytes.
//
// The sums of a group's products are exact integers. The float32 operations on them have one order, group after group,
// whatever M is. So no bit of a row's result depends on the other rows.

#include <cmath>
#include <limits>

#include "byte_products.h"
#include "gemm.h"
#include "weight_formats.h"

namespace {

// A group of a row of x. The sums are those of all bytes and of the first 16, times -1.
struct InputGroup {
    float scale;
    int32_t negative_sum, negative_first_sum;
    int8_t bytes[GROUP];
};
constexpr long INPUT_GROUP_BYTES = sizeof(InputGroup);

// Below this, 127 divided by the largest number of a group would be infinite: the group counts as zeros.
constexpr float MIN_LARGEST = 128 * std::numeric_limits<float>::min();

// The group of 32 numbers. If one of them is not finite, neither are the products: the scale is NaN.
InputGroup quantize_group(Floats first, Floats second) {
    const Mask is_nan_lane = is_nan(first) | is_nan(second);
    const float largest = reduce_max(max(abs(first), abs(second)));
    if (count_lanes(is_nan_lane) || largest > std::numeric_limits<float>::max()) return {.scale = NAN};
    const bool is_zero = largest < MIN_LARGEST;
    const Floats factor = broadcast(is_zero ? 0 : 127 / largest);
    const Floats rounded[] = {round(first * factor), round(second * factor)};
    InputGroup group;
    group.scale = is_zero ? 0 : largest / 127;
    group.negative_first_sum = -static_cast<int32_t>(reduce_add(rounded[0]));
    group.negative_sum = -static_cast<int32_t>(reduce_add(rounded[0] + rounded[1]));
    for (int i = 0; i < 2; i++) store_int8(group.bytes + i * WIDTH, to_integers(rounded[i]), first_lanes(WIDTH));
    return group;
}

// Rounds x (M, K) to groups (M, ceil(K / 32)). Numbers beyond K count as 0.
template <class Number>
STRUCT(QuantizeGroupsArguments, (const Number*, x), (InputGroup*, groups), (long, M), (long, K));

template <class Number>
void quantize_groups(const QuantizeGroupsArguments<Number>& args, long task, long num_tasks) {
    const long M = args.M, K = args.K, num_groups = (K + GROUP - 1) / GROUP;
    for (long row = M * task / num_tasks; row < M * (task + 1) / num_tasks; row++)
        for (long group = 0; group < num_groups; group++) {
            const Number* from = args.x + row * K + group * GROUP;
            const long count = K - group * GROUP;
            args.groups[row * num_groups + group] =
                quantize_group(load(from, first_lanes(count)), load(from + WIDTH, first_lanes(count - WIDTH)));
        }
}

// The same four bytes of x in each lane.
Integers broadcast_four(const int8_t* x) {
    uint32_t four;
    std::memcpy(&four, x, sizeof four);
    return broadcast_integer(four);
}

// The sums go to y (M, N) in float32 or bfloat16, with a bias (N) of the same dtype or none. Rows are `stride` apart.
struct Output {
    void* y;
    const void* b;
    long stride;
    bool is_bfloat16;

    void store_sums(const Block& block, int row, int tile, Floats sums) const {
        is_bfloat16 ? store_as<BFloat16>(block, row, tile, sums) : store_as<float>(block, row, tile, sums);
    }

    template <class Number>
    void store_as(const Block& block, int row, int tile, Floats sums) const {
        const long n = block.output + tile * WIDTH;
        if (b) sums = sums + load(static_cast<const Number*>(b) + n, block.valid(tile));
        store(static_cast<Number*>(y) + (block.row + row) * stride + n, sums, block.valid(tile));
    }
};

template <class Format>
struct GroupedProduct {
    using Scale = typename Format::Scale;
    // Rows of x whose two kinds of sums fit into the registers; with AVX2, only the sums of a group do.
    static constexpr int ROWS = HAS_AVX512 ? 6 : 4, FEWER_ROWS = ROWS;
    const InputGroup* x;
    const uint8_t *w, *scales;
    Output output;
    long num_groups;

    long tile_bytes() const { return num_groups * Format::GROUP_BYTES; }

    template <int rows, int tiles, bool prefetches_next>
    void multiply(const Block& block) const {
        if constexpr (tiles < TILES_PER_BLOCK && rows > 1) {  // only the last tile is alone: save the compiler's time
            for (Block one = block; one.row < block.row + rows; one.row++) multiply<1, tiles, false>(one);
            return;
        }
        const long tile = block.output / WIDTH, scale_bytes = Scale::bytes(num_groups);
        const uint8_t *const w = this->w + tile * tile_bytes(), *const scales = this->scales + tile * scale_bytes;
        Floats totals[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) totals[row][tile] = Floats{};
        for (long group = 0; group < num_groups; group++) {
            const InputGroup* const x = this->x + block.row * num_groups + group;
            Scale scale[tiles];
            UNROLL for (int tile = 0; tile < tiles; tile++)
                scale[tile] = Scale::load(scales + tile * scale_bytes, group);
            UNROLL for (int part = 0; part < Scale::PARTS; part++) {
                Integers sums[rows][tiles];
                sum_part<prefetches_next>(block, w, x, group, part, sums);
                UNROLL for (int row = 0; row < rows; row++) {
                    const Floats x_scale = broadcast(x[row * num_groups].scale);
                    UNROLL for (int tile = 0; tile < tiles; tile++)
                        totals[row][tile] =
                            fma(to_floats(sums[row][tile]), scale[tile].of_part(part) * x_scale, totals[row][tile]);
                }
            }
            if constexpr (Scale::HAS_MINIMUM) subtract_minimums(x, scale, totals);
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) output.store_sums(block, row, tile, totals[row][tile]);
    }

   private:
    // The sums of the products of one part of a group: `w` is the first tile of the block, `x` the group of its first row.
    template <bool prefetches_next, int rows, int tiles>
    [[gnu::always_inline]] void sum_part(
        const Block& block, const uint8_t* w, const InputGroup* x, long group, int part,
        Integers (&sums)[rows][tiles]) const {
        constexpr int PAIRS = VECTORS_PER_GROUP / 2 / Scale::PARTS;  // pairs of vectors of a part
        using ByteSums = ::ByteSums<Format::BITS, rows, tiles>;
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++)
                sums[row][tile] = ByteSums::SUBTRACTS_OFFSET ? Integers{} : first_sum(x[row * num_groups], part);
        ByteSums products(sums);
        UNROLL for (int pair = part * PAIRS; pair < (part + 1) * PAIRS; pair++) {
            Integers vectors[tiles][2];
            UNROLL for (int tile = 0; tile < tiles; tile++) {
                const long offset = tile * tile_bytes() + group * Format::GROUP_BYTES;
                for (int line = pair * Format::BITS / 4; line < (pair + 1) * Format::BITS / 4; line++)
                    block.prefetch<prefetches_next>(w, offset + line * 4 * WIDTH);
                Format::unpack(w + offset, pair, vectors[tile]);
            }
            UNROLL for (int i = 0; i < 2; i++) {
                UNROLL for (int row = 0; row < rows; row++) {
                    const Integers four = broadcast_four(x[row * num_groups].bytes + (2 * pair + i) * 4);
                    UNROLL for (int tile = 0; tile < tiles; tile++)
                        products.add(row, tile, ByteSums::prepare(vectors[tile][i]), four);
                }
                products.end_of_vector(2 * pair + i);
            }
        }
    }

    // Subtracts the minimums of a group of weights, times the sum of the group of each row.
    template <int rows, int tiles>
    [[gnu::always_inline]] void subtract_minimums(
        const InputGroup* x, const Scale (&scale)[tiles], Floats (&totals)[rows][tiles]) const {
        UNROLL for (int row = 0; row < rows; row++) {
            const InputGroup& own = x[row * num_groups];
            const Floats x_sum = broadcast(static_cast<float>(own.negative_sum) * own.scale);
            UNROLL for (int tile = 0; tile < tiles; tile++)
                totals[row][tile] = fma(scale[tile].minimum, x_sum, totals[row][tile]);
        }
    }

    // What the sum of the products of a part begins with: the offset of the weights, times -1 and the sum of the bytes.
    static Integers first_sum(const InputGroup& x, int part) {
        if constexpr (Scale::HAS_MINIMUM) return Integers{};
        const int32_t first = x.negative_first_sum;
        const int32_t sum = Scale::PARTS == 1 ? x.negative_sum : part == 0 ? first : x.negative_sum - first;
        return broadcast_integer(static_cast<uint32_t>(sum)) << Format::OFFSET_SHIFT;
    }
};

// y = x w^T + b, where `quantize_groups` wrote the groups of x.
STRUCT(
    GroupedLinearArguments,
    (const InputGroup*, groups),
    (const uint8_t*, integers),
    (const uint8_t*, scales),
    (const void*, b),  // or null
    (void*, y),
    (long, M),
    (long, N),
    (long, K),
    (long, y_stride),     // from a row of y to the next one
    (long, is_bfloat16));  // whether b and y are bfloat16; otherwise they are float32

template <class Format>
void linear(const GroupedLinearArguments& args, long task, long num_tasks) {
    const Output output = {args.y, args.b, args.y_stride, args.is_bfloat16 != 0};
    const GroupedProduct<Format> product = {
        args.groups, args.integers, args.scales, output, (args.K + GROUP - 1) / GROUP};
    multiply_all(VectorProduct<GroupedProduct<Format>>{product}, args.M, args.N, task, num_tasks);
}

}  // namespace

KERNEL(linear_q4_0, linear<WeightFormat<4, GroupScale>>)
KERNEL(linear_q5_0, linear<WeightFormat<5, GroupScale>>)
KERNEL(linear_q8_0, linear<WeightFormat<8, GroupScale>>)
KERNEL(linear_q4_1, linear<WeightFormat<4, GroupScaleAndMinimum>>)
KERNEL(linear_q5_1, linear<WeightFormat<5, GroupScaleAndMinimum>>)
KERNEL(linear_q4_k, linear<WeightFormat<4, ByteScaleAndMinimum>>)
KERNEL(linear_q5_k, linear<WeightFormat<5, ByteScaleAndMinimum>>)
KERNEL(linear_q6_k, linear<WeightFormat<6, HalfGroupScale>>)
KERNEL(linear_int4, linear<WeightFormat<4, RowScaleAndMinimum>>)
KERNEL(linear_int5, linear<WeightFormat<5, RowScaleAndMinimum>>)
KERNEL(linear_int6, linear<WeightFormat<6, RowScaleAndMinimum>>)
KERNEL(quantize_groups_float32, quantize_groups<float>)
KERNEL(quantize_groups_bfloat16, quantize_groups<BFloat16>)

EXPORT_CONSTANT(WIDTH)
EXPORT_CONSTANT(GROUP)
EXPORT_CONSTANT(SUPERGROUP)
EXPORT_CONSTANT(INPUT_GROUP_BYTES)
