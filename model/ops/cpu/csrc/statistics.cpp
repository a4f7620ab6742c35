// Statistics of logits and of stages: the distribution and the maximum of each row, and summaries of tensors.
//
// Each result is computed in float32, and summaries of many numbers in float64. A task has some of the rows (`moments`:
// some of the chunks). A row is computed from its own numbers, in an order that its length decides, so no bit of it
// depends on the other rows.

#include <cmath>

#include "rows.h"

namespace {

// Log-sum-exp and softmax of each row, in float32: x (N, size) -> log_totals (N), and probabilities (N, size) if these
// are wanted.
template <class Number>
STRUCT(
    DistributionArguments,
    (const Number*, x),
    (float*, probabilities),  // or null
    (float*, log_totals),
    (long, num_rows),
    (long, size));

template <class Number>
void distribution(const DistributionArguments<Number>& args, long task, long num_tasks) {
    const long size = args.size;
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        const Number* x = args.x + row * size;
        float* const probabilities = args.probabilities ? args.probabilities + row * size : nullptr;
        Floats maxima = broadcast(-INFINITY), sum = Floats{};
        for_each_vector(size, [&](long i, Mask mask) {
            maxima = max(maxima, select(mask, load(x + i, mask), broadcast(-INFINITY)));
        });
        const float shift = reduce_max(maxima);
        for_each_vector(size, [&](long i, Mask mask) {
            const Floats value = exp(load(x + i, mask) - broadcast(shift));
            sum = sum + select(mask, value, Floats{});
            if (probabilities) store(probabilities + i, value, mask);
        });
        const float total = reduce_add(sum);
        args.log_totals[row] = shift + std::log(total);
        if (probabilities)
            for_each_vector(size, [&](long i, Mask mask) {
                store(probabilities + i, load(probabilities + i, mask) / broadcast(total), mask);
            });
    });
}

// The maximum of each row, NaN if the row has a NaN, and the index of its first occurrence. Numbers that a bitmask
// excludes count as -inf.
template <class Number>
STRUCT(
    ArgmaxArguments,
    (const Number*, x),  // (N, size)
    (float*, values),
    (int64_t*, indices),
    (const uint32_t*, bitmasks),  // (N, words_per_row) or null
    (long, num_rows),
    (long, size),
    (long, words_per_row));

template <class Number>
void argmax(const ArgmaxArguments<Number>& args, long task, long num_tasks) {
    const long size = args.size;
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        const Number* x = args.x + row * size;
        const Bitmask bitmask = Bitmask{args.bitmasks, args.words_per_row}.row(row);
        Floats maxima = broadcast(-INFINITY);
        Integers first_index = Integers{};
        Mask is_nan_lane = {};
        for_each_vector(size, [&](long i, Mask mask) {
            Floats value = load(x + i, mask);
            if (bitmask.words != nullptr) value = select(bitmask.lanes(i), value, broadcast(-INFINITY));
            const Mask is_larger = is_greater(value, maxima) & mask;
            maxima = select(is_larger, value, maxima);
            first_index = select(is_larger, broadcast_integer(i), first_index);
            is_nan_lane = is_nan_lane | is_nan(value);
        });
        const float value = reduce_max(maxima);
        const Mask is_maximum = is_equal(maxima, broadcast(value));
        const Integers indices = select(is_maximum, first_index + lane_indices(), broadcast_integer(size));
        args.values[row] = count_lanes(is_nan_lane) ? NAN : value;
        args.indices[row] = reduce_min(indices);
    });
}

Mask is_finite(Floats value, Mask mask) {
    return is_greater(broadcast(INFINITY), abs(value)) & mask;
}

// Statistics of some finite numbers. `squares` is the sum of their squared differences from the mean.
struct Moments {
    double minimum = INFINITY, maximum = -INFINITY, count = 0, mean = 0, squares = 0;

    // Adds the numbers of another set (Chan, Golub and LeVeque 1983).
    void add(const Moments& other) {
        if (other.count == 0) return;
        const double total = count + other.count, delta = other.mean - mean;
        squares += other.squares + delta * delta * count * other.count / total;
        mean += delta * other.count / total;
        count = total;
        minimum = std::min(minimum, other.minimum);
        maximum = std::max(maximum, other.maximum);
    }
};

// The moments of the finite numbers in x, in two passes: the mean, then the differences from it. `size` is at most a
// few thousand, so that x stays in the cache. Several sums run side by side, since each addition takes some cycles. The
// second pass prefetches the numbers after x.
//
// `assume_finite` takes half the time: it assumes that all numbers are finite. If the mean is not finite, the
// assumption was wrong, and the function starts again without it. It also does so at once if `size` is not a
// multiple of SUMS vectors.
template <bool assume_finite, class Number>
Moments moments_of(const Number* x, long size) {
    constexpr int SUMS = 4;
    if (assume_finite && size % (SUMS * WIDTH)) return moments_of<false>(x, size);
    Floats minima[SUMS], maxima[SUMS], sum[SUMS], squares[SUMS], remainder[SUMS];
    UNROLL for (int j = 0; j < SUMS; j++) {
        minima[j] = broadcast(INFINITY), maxima[j] = broadcast(-INFINITY);
        sum[j] = squares[j] = remainder[j] = Floats{};
    }
    const auto for_each = [&](auto visit) {
        for (long i = 0; i < size; i += SUMS * WIDTH)
            UNROLL for (int j = 0; j < SUMS; j++) {
                const Number* const from = x + i + j * WIDTH;
                const Mask mask = first_lanes(size - i - j * WIDTH);
                const Floats value = assume_finite ? load(from) : load(from, mask);
                visit(j, from, value, is_finite(value, mask));
            }
    };
    const auto select_if = [](Mask mask, Floats a, Floats b) { return assume_finite ? a : select(mask, a, b); };
    long count = 0;
    for_each([&](int j, const Number*, Floats value, Mask finite) {
        minima[j] = min(minima[j], select_if(finite, value, broadcast(INFINITY)));
        maxima[j] = max(maxima[j], select_if(finite, value, broadcast(-INFINITY)));
        sum[j] = sum[j] + select_if(finite, value, Floats{});
        count += assume_finite ? WIDTH : count_lanes(finite);
    });
    if (count == 0) return {};
    const auto total = [](const Floats (&sums)[SUMS]) {
        return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
    };
    const float mean = total(sum) / count;
    if (assume_finite && !std::isfinite(mean)) return moments_of<false>(x, size);
    for_each([&](int j, const Number* from, Floats value, Mask finite) {
        __builtin_prefetch(from + size);
        const Floats centered = select_if(finite, value - broadcast(mean), Floats{});
        squares[j] = fma(centered, centered, squares[j]);
        remainder[j] = remainder[j] + centered;  // sums to the rounding error of the mean, times count
    });
    UNROLL for (int j = 1; j < SUMS; j++) {
        minima[0] = min(minima[0], minima[j]);
        maxima[0] = max(maxima[0], maxima[j]);
    }
    const double error = static_cast<double>(total(remainder)) / count;
    return {reduce_min(minima[0]), reduce_max(maxima[0]), static_cast<double>(count), mean + error,
            total(squares) - error * error * count};
}

constexpr long SUMMARY_CHUNK = 1 << 14;  // numbers
constexpr long NUM_MOMENTS = sizeof(Moments) / sizeof(double);

// A tensor to be summarized: `num_elements` numbers, in rows of `size` numbers that lie `stride` numbers apart.
STRUCT(TensorLayout, (const void*, address), (long, num_elements), (long, stride), (long, size));

long num_chunks(const TensorLayout& layout) { return (layout.num_elements + SUMMARY_CHUNK - 1) / SUMMARY_CHUNK; }

// The moments of each chunk of some tensors. The chunks of all tensors lie one after the other.
STRUCT(MomentsArguments, (const TensorLayout*, layouts), (Moments*, moments), (long, num_tensors));

template <class Number>
void moments(const MomentsArguments& args, long task, long num_tasks) {
    constexpr long SPAN = 256 * WIDTH;  // numbers whose moments are computed in float32, then added in float64
    long total = 0, index = 0;
    for (long n = 0; n < args.num_tensors; n++) total += num_chunks(args.layouts[n]);
    for (long n = 0; n < args.num_tensors; n++) {
        const TensorLayout& layout = args.layouts[n];
        const StridedRows<const Number> x = {(const Number*)layout.address, layout.stride, layout.size};
        for (long begin = 0; begin < layout.num_elements; begin += SUMMARY_CHUNK, index++) {
            if (index < total * task / num_tasks || index >= total * (task + 1) / num_tasks) continue;
            Moments& all = args.moments[index] = {};
            for (long next, i = begin, end = std::min(begin + SUMMARY_CHUNK, layout.num_elements); i < end; i = next) {
                next = std::min({i + SPAN, (i / layout.size + 1) * layout.size, end});
                all.add(moments_of<true>(x[i / layout.size] + i % layout.size, next - i));
            }
        }
    }
}

STRUCT(
    Summary,
    (double, minimum),
    (double, maximum),
    (double, mean),
    (double, standard_deviation),
    (double, l2_norm),
    (double, num_missing));  // how many numbers are not finite

// Combines the moments of the chunks of each tensor.
STRUCT(
    SummariesArguments,
    (const TensorLayout*, layouts),
    (const Moments*, moments),
    (Summary*, summaries),
    (long, num_tensors));

void summaries(const SummariesArguments& args, long task, long) {
    if (task > 0) return;  // one task computes everything
    const Moments* chunk = args.moments;
    for (long n = 0; n < args.num_tensors; n++) {
        Moments all;
        for (const Moments* const end = chunk + num_chunks(args.layouts[n]); chunk < end; chunk++) all.add(*chunk);
        const double squares = std::max(0.0, all.squares);
        args.summaries[n] = {
            all.minimum, all.maximum, all.mean, std::sqrt(squares / all.count),
            std::sqrt(squares + all.count * all.mean * all.mean), args.layouts[n].num_elements - all.count,
        };
    }
}

}  // namespace

EXPORT_CONSTANT(SUMMARY_CHUNK)
EXPORT_CONSTANT(NUM_MOMENTS)
EXPORT_DESCRIPTION(tensor_layout, TensorLayout)
EXPORT_DESCRIPTION(summary, Summary)

KERNEL(summaries_float32, summaries)

#define KERNELS(Number, dtype)                         \
    KERNEL(argmax_##dtype, argmax<Number>)             \
    KERNEL(distribution_##dtype, distribution<Number>) \
    KERNEL(moments_##dtype, moments<Number>)

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
