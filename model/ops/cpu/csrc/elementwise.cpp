// The operations between the matrix products of a network: embedding lookup, sums, norms, rotary positions,
// activations, and writing keys and values to the cache; and statistics of logits and of stages.
//
// Tensors are rows of numbers. Each result is computed in float32 and rounded once to the dtype of the tensor. A task
// has some of the rows (`add` and `activate`: some of the vectors; `moments`: some of the chunks). A row is computed
// from its own numbers, in an order that its length decides, so no bit of it depends on the other rows.

#include <cmath>

#include "rows.h"

namespace {

// Looks up rows: out (N, size) = table[indices (N)].
template <class Number>
STRUCT(
    TakeRowsArguments,
    (const Number*, table),
    (const int64_t*, indices),
    (Number*, out),
    (long, num_rows),
    (long, size));

template <class Number>
void take_rows(const TakeRowsArguments<Number>& args, long task, long num_tasks) {
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        std::memcpy(args.out + row * args.size, args.table + args.indices[row] * args.size, args.size * sizeof(Number));
    });
}

// Copies the keys and values of new tokens, k and v (N, size), to slots (N) of keys and values (num_slots, size).
template <class Number>
STRUCT(
    WriteRowsArguments,
    (const Number*, k),
    (const Number*, v),
    (Number*, keys),
    (Number*, values),
    (const int64_t*, slots),
    (long, num_rows),
    (long, size),
    (long, k_stride),
    (long, v_stride));

template <class Number>
void write_rows(const WriteRowsArguments<Number>& args, long task, long num_tasks) {
    const long size = args.size;
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        const long slot = args.slots[row];
        std::memcpy(args.keys + slot * size, args.k + row * args.k_stride, size * sizeof(Number));
        std::memcpy(args.values + slot * size, args.v + row * args.v_stride, size * sizeof(Number));
    });
}

// out = a + b, each of `num_elements` numbers.
template <class Number>
STRUCT(AddArguments, (const Number*, a), (const Number*, b), (Number*, out), (long, num_elements));

template <class Number>
void add(const AddArguments<Number>& args, long task, long num_tasks) {
    const long vectors = (args.num_elements + WIDTH - 1) / WIDTH;
    for_each_row(vectors, task, num_tasks, [&](long vector) {
        const long i = vector * WIDTH;
        const Mask mask = first_lanes(args.num_elements - i);
        store(args.out + i, load(args.a + i, mask) + load(args.b + i, mask), mask);
    });
}

// out = parameter x, or parameter tanh(x / parameter), each of `num_elements` numbers.
template <class Number>
STRUCT(MapArguments, (const Number*, x), (Number*, out), (long, num_elements), (double, parameter));

template <class Number, Floats (*operation)(Floats, Floats)>
void map_numbers(const MapArguments<Number>& args, long task, long num_tasks) {
    const Floats parameter = broadcast(args.parameter);
    for_each_row((args.num_elements + WIDTH - 1) / WIDTH, task, num_tasks, [&](long vector) {
        const long i = vector * WIDTH;
        const Mask mask = first_lanes(args.num_elements - i);
        store(args.out + i, operation(load(args.x + i, mask), parameter), mask);
    });
}

Floats scale(Floats x, Floats factor) { return factor * x; }

// LayerNorm or RMSNorm: x (outer, inner, size) -> out, contiguous. A row, minus its mean if it is to be centered
// (LayerNorm), is divided by its scale, multiplied by the gain (the weight plus `offset`), and the bias is added. All
// rows share one weight if the stride of the weight is 0; otherwise each of the `inner` rows has its own. Also stores
// the `scales` (outer, inner) in float32, and the rows before the gain, `normalized`, if these are wanted.
template <class Number>
STRUCT(
    NormArguments,
    (const Number*, x),
    (const Number*, weight),
    (const Number*, bias),  // or null
    (Number*, out),
    (float*, scales),       // or null
    (Number*, normalized),  // or null
    (long, outer),
    (long, inner),
    (long, size),
    (long, outer_stride),   // of x
    (long, inner_stride),   // of x
    (long, weight_stride),
    (long, is_centered),
    (double, eps),
    (double, offset));

template <class Number>
void norm(const NormArguments<Number>& args, long task, long num_tasks) {
    const long size = args.size;
    const float eps = args.eps;
    const Number *const weight = args.weight, *const bias = args.bias;
    float* const scales = args.scales;
    Number* const normalized = args.normalized;
    const Floats offset = broadcast(args.offset);
    for_each_row(args.outer * args.inner, task, num_tasks, [&](long row) {
        const long inner_row = row % args.inner;
        const Number* from = args.x + row / args.inner * args.outer_stride + inner_row * args.inner_stride;
        Number* to = args.out + row * size;
        Floats shift = Floats{}, squares = Floats{};
        if (args.is_centered) {
            for_each_vector(size, [&](long i, Mask mask) { shift = shift + load(from + i, mask); });
            shift = broadcast(reduce_add(shift) / size);
        }
        for_each_vector(size, [&](long i, Mask mask) {
            const Floats centered = select(mask, load(from + i, mask) - shift, Floats{});
            squares = fma(centered, centered, squares);
        });
        const float scale = std::sqrt(reduce_add(squares) / size + eps);
        if (scales) scales[row] = scale;
        const Floats factor = broadcast(1.0f / scale);
        for_each_vector(size, [&](long i, Mask mask) {
            Floats value = (load(from + i, mask) - shift) * factor;
            if (normalized) store(normalized + row * size + i, value, mask);
            value = value * (load(weight + inner_row * args.weight_stride + i, mask) + offset);
            if (bias) value = value + load(bias + i, mask);
            store(to + i, value, mask);
        });
    });
}

// Rotary angles: positions (N), frequencies (D/2) -> cosines and sines (N, D/2) in float32, times `factor`.
STRUCT(
    RotationArguments,
    (const int64_t*, positions),
    (const float*, frequencies),
    (float*, cosines),
    (float*, sines),
    (long, num_rows),
    (long, half),  // D/2
    (double, factor));

void rotation(const RotationArguments& args, long task, long num_tasks) {
    const float factor = args.factor;
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        for (long i = 0; i < args.half; i++) {
            const float angle = args.positions[row] * args.frequencies[i];
            args.cosines[row * args.half + i] = std::cos(angle) * factor;
            args.sines[row * args.half + i] = std::sin(angle) * factor;
        }
    });
}

// Chooses the angles (N, D/2) of each row: the long ones if lengths[row] is above the limit, otherwise the short ones.
STRUCT(
    SelectRotationArguments,
    (const float*, short_cosines),
    (const float*, short_sines),
    (const float*, long_cosines),
    (const float*, long_sines),
    (const int64_t*, lengths),
    (float*, cosines),
    (float*, sines),
    (long, num_rows),
    (long, half),  // D/2
    (long, limit));

void select_rotation(const SelectRotationArguments& args, long task, long num_tasks) {
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        const bool is_long = args.lengths[row] > args.limit;
        const long begin = row * args.half, num_bytes = args.half * sizeof(float);
        std::memcpy(args.cosines + begin, (is_long ? args.long_cosines : args.short_cosines) + begin, num_bytes);
        std::memcpy(args.sines + begin, (is_long ? args.long_sines : args.short_sines) + begin, num_bytes);
    });
}

// Rotates each pair (i, i + half) of every head by its angle: x (N, H, D) -> out. The dims from 2 half on stay as they
// are. Row n takes the angles of row n % period.
template <class Number>
STRUCT(
    RotateArguments,
    (const Number*, x),
    (Number*, out),
    (const float*, cosines),  // (period, half)
    (const float*, sines),
    (long, num_rows),
    (long, num_heads),
    (long, d_head),
    (long, x_stride),
    (long, period),
    (long, half));

template <class Number>
void rotate(const RotateArguments<Number>& args, long task, long num_tasks) {
    const long heads = args.num_heads, size = args.d_head, half = args.half;
    const StridedRows<const Number> x = {args.x, args.x_stride, heads * size};
    const StridedRows<Number> out = {args.out, x.size, x.size};
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        const float* const cosines = args.cosines + row % args.period * half;
        const float* const sines = args.sines + row % args.period * half;
        for (long head = 0; head < heads; head++) {
            const Number* from = x[row] + head * size;
            Number* to = out[row] + head * size;
            if (size > 2 * half) std::memcpy(to + 2 * half, from + 2 * half, (size - 2 * half) * sizeof(Number));
            for_each_vector(half, [&](long i, Mask mask) {
                const Floats cosine = load(cosines + i, mask), sine = load(sines + i, mask);
                const Floats first = load(from + i, mask), second = load(from + half + i, mask);
                store(to + i, fma(first, cosine, Floats{} - second * sine), mask);
                store(to + half + i, fma(second, cosine, first * sine), mask);
            });
        }
    });
}

Floats sigmoid(Floats x) {
    const Floats one = broadcast(1.0f);
    return one / (one + exp(Floats{} - x));
}

Floats silu(Floats x) { return x * sigmoid(x); }

// x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
Floats gelu_tanh(Floats x) {
    const Floats cubed = x * x * x;
    const Floats inner = fma(broadcast(0.044715f), cubed, x);
    return x * sigmoid(broadcast(1.5957691216f) * inner);
}

// erf: a polynomial near 0, otherwise 1 - e^(-x^2) p(1 / (1 + x/2)). Both are Chebyshev fits; the error is below 2e-7.
Floats erf(Floats x) {
    constexpr float NEAR[] = {1.1283792f,  -0.37612638f,  0.11283783f,   -0.026865438f,
                              0.00522105349f, -0.00084843964f, 0.00011268254f, -9.6735912e-06f};
    constexpr float FAR[] = {1.0225382e-05f, 0.28183228f, 0.28510171f, 0.22661601f,  0.26444668f,
                             -0.17508414f,   0.50723499f, -0.70665616f, 0.4031744f, -0.0867068395f};
    const Floats one = broadcast(1.0f), square = x * x, size = min(abs(x), broadcast(4.5f));
    const Floats fraction = one / fma(broadcast(0.5f), size, one);
    const Floats far = copy_sign(one - exp(Floats{} - size * size) * polynomial(FAR, fraction), x);
    return select(is_greater(one, abs(x)), x * polynomial(NEAR, square), select(is_nan(x), x, far));
}

// x/2 (1 + erf(x / sqrt 2))
Floats gelu(Floats x) {
    return x * broadcast(0.5f) * (broadcast(1.0f) + erf(x * broadcast(0.70710678f)));
}

Floats relu(Floats x) { return max(Floats{}, x); }  // NaN stays

// out (N, size) = activation(pre), times `linear` if there is one.
template <class Number>
STRUCT(
    ActivateArguments,
    (const Number*, pre),
    (const Number*, linear),  // or null
    (Number*, out),
    (long, num_rows),
    (long, size),
    (long, pre_stride),
    (long, linear_stride));

template <class Number, Floats (*activation)(Floats)>
void activate(const ActivateArguments<Number>& args, long task, long num_tasks) {
    const long size = args.size, vectors = (size + WIDTH - 1) / WIDTH;
    const StridedRows<const Number> pre = {args.pre, args.pre_stride, size};
    const StridedRows<const Number> linear = {args.linear, args.linear_stride, size};
    const StridedRows<Number> out = {args.out, size, size};
    const long count = args.num_rows * vectors;
    const long begin = count * task / num_tasks, end = count * (task + 1) / num_tasks;
    for (long row = begin / vectors; row * vectors < end; row++) {  // the first and the last row may be incomplete
        const long last = std::min(vectors, end - row * vectors);
        for (long vector = std::max(0L, begin - row * vectors); vector < last; vector++) {
            const long i = vector * WIDTH;
            const Mask mask = first_lanes(size - i);
            Floats value = activation(load(pre[row] + i, mask));
            if (linear.from) value = value * load(linear[row] + i, mask);
            store(out[row] + i, value, mask);
        }
    }
}

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
        _mm_prefetch((const char*)(from + size), _MM_HINT_T0);
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
KERNEL(rotation_float32, rotation)
KERNEL(select_rotation_float32, select_rotation)

#define KERNELS(Number, dtype)                                    \
    KERNEL(take_rows_##dtype, take_rows<Number>)                  \
    KERNEL(write_rows_##dtype, write_rows<Number>)                \
    KERNEL(add_##dtype, add<Number>)                              \
    KERNEL(scale_##dtype, map_numbers<Number, scale>)             \
    KERNEL(softcap_##dtype, map_numbers<Number, softcap>)         \
    KERNEL(norm_##dtype, norm<Number>)                            \
    KERNEL(rotate_##dtype, rotate<Number>)                        \
    KERNEL(argmax_##dtype, argmax<Number>)                        \
    KERNEL(distribution_##dtype, distribution<Number>)            \
    KERNEL(moments_##dtype, moments<Number>)                      \
    KERNEL(silu_##dtype, activate<Number, silu>)                  \
    KERNEL(gelu_##dtype, activate<Number, gelu>)                  \
    KERNEL(gelu_tanh_##dtype, activate<Number, gelu_tanh>)        \
    KERNEL(relu_##dtype, activate<Number, relu>)

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
