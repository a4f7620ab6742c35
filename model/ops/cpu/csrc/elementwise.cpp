// The operations between the matrix products of a network: embedding lookup, sums, norms, rotary positions,
// activations, and writing keys and values to the cache; and statistics of logits and of stages.
//
// Tensors are rows of numbers. Each result is computed in float32 and rounded once to the dtype of the tensor. A task
// has some of the rows (`add` and `activate`: some of the vectors; `moments`: some of the chunks). A row is computed
// from its own numbers, in an order that its length decides, so no bit of it depends on the other rows.

#include <cmath>

#include "rows.h"

namespace {

// Looks up rows: out (N, size) = table[index (N)]. Args: table, index, out, N, size.
template <class Number>
void take_rows(Args args, long task, long num_tasks) {
    const Number* table = args.array<Number>(0);
    const int64_t* index = args.array<int64_t>(1);
    const StridedRows<Number> out = {args.array<Number>(2), args.integer(4), args.integer(4)};
    for_each_row(args.integer(3), task, num_tasks, [&](long row) {
        std::memcpy(out[row], table + index[row] * out.size, out.size * sizeof(Number));
    });
}

// Copies the keys and values of new tokens, k and v (N, size), to slots (N) of keys and values (num_slots, size). Args:
// k, its stride, v, its stride, keys, values, slots, N, size.
template <class Number>
void write_rows(Args args, long task, long num_tasks) {
    const long size = args.integer(8);
    const StridedRows<Number> k = {args.array<Number>(0), args.integer(1), size};
    const StridedRows<Number> v = {args.array<Number>(2), args.integer(3), size};
    Number *const keys = args.array<Number>(4), *const values = args.array<Number>(5);
    const int64_t* slots = args.array<int64_t>(6);
    for_each_row(args.integer(7), task, num_tasks, [&](long row) {
        std::memcpy(keys + slots[row] * size, k[row], size * sizeof(Number));
        std::memcpy(values + slots[row] * size, v[row], size * sizeof(Number));
    });
}

// out = a + b. Args: a, b, out, count.
template <class Number>
void add(Args args, long task, long num_tasks) {
    const Number *a = args.array<Number>(0), *b = args.array<Number>(1);
    Number* out = args.array<Number>(2);
    const long count = args.integer(3), vectors = (count + WIDTH - 1) / WIDTH;
    for_each_row(vectors, task, num_tasks, [&](long vector) {
        const long i = vector * WIDTH;
        const Mask mask = first_lanes(count - i);
        store(out + i, load(a + i, mask) + load(b + i, mask), mask);
    });
}

// out = factor x, or cap tanh(x / cap). Args: x, out, count, factor or cap.
template <class Number, class Operation>
void map_numbers(Args args, long task, long num_tasks, Operation operation) {
    const Number* x = args.array<Number>(0);
    Number* out = args.array<Number>(1);
    const Floats parameter = broadcast(args.real(3));
    const long count = args.integer(2);
    for_each_row((count + WIDTH - 1) / WIDTH, task, num_tasks, [&](long vector) {
        const long i = vector * WIDTH;
        const Mask mask = first_lanes(count - i);
        store(out + i, operation(load(x + i, mask), parameter), mask);
    });
}

// LayerNorm or RMSNorm: x (outer, inner, size) -> out, contiguous. A row, minus its mean if it is to be centered
// (LayerNorm), is divided by its scale, multiplied by the gain (the weight plus `offset`), and the bias is added. All
// rows share one weight if the stride of the weight is 0; otherwise each of the `inner` rows has its own. Also stores
// the `scales` (outer, inner) in float32, and the rows before the gain, `normalized`, if these are wanted.
// Args: x, weight, bias (or 0), out, outer, inner, the outer and the inner stride of x, size, eps, whether to center,
// scales (or 0), normalized (or 0), the stride of the weight, offset.
template <class Number>
void norm(Args args, long task, long num_tasks) {
    const Number *x = args.array<Number>(0), *weight = args.array<Number>(1), *bias = args.array<Number>(2);
    const long inner = args.integer(5), outer_stride = args.integer(6), inner_stride = args.integer(7);
    const long size = args.integer(8);
    const float eps = args.real(9);
    float* const scales = args.array<float>(11);
    Number* const normalized = args.array<Number>(12);
    const long weight_stride = args.integer(13);
    const Floats offset = broadcast(args.real(14));
    for_each_row(args.integer(4) * inner, task, num_tasks, [&](long row) {
        const Number* from = x + row / inner * outer_stride + row % inner * inner_stride;
        Number* to = args.array<Number>(3) + row * size;
        Floats shift = Floats{}, squares = Floats{};
        if (args.integer(10)) {
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
            value = value * (load(weight + row % inner * weight_stride + i, mask) + offset);
            if (bias) value = value + load(bias + i, mask);
            store(to + i, value, mask);
        });
    });
}

// Rotary angles: positions (N), frequencies (D/2) -> cosines and sines (N, D/2) in float32, times `factor`. Args:
// positions, frequencies, cosines, sines, N, D/2, factor.
void rotation(Args args, long task, long num_tasks) {
    const int64_t* positions = args.array<int64_t>(0);
    const float* frequencies = args.array<float>(1);
    const long half = args.integer(5);
    for_each_row(args.integer(4), task, num_tasks, [&](long row) {
        for (long i = 0; i < half; i++) {
            const float angle = positions[row] * frequencies[i];
            args.array<float>(2)[row * half + i] = std::cos(angle) * args.real(6);
            args.array<float>(3)[row * half + i] = std::sin(angle) * args.real(6);
        }
    });
}

// Chooses the angles of each row: of `long` if lengths[row] is above the limit, otherwise of `short`. Args: cosines
// (N, half) and sines of `short`, likewise of `long`, lengths (N), cosines and sines to write, N, half, limit.
void select_rotation(Args args, long task, long num_tasks) {
    const long half = args.integer(8);
    for_each_row(args.integer(7), task, num_tasks, [&](long row) {
        const int from = args.array<int64_t>(4)[row] > args.integer(9) ? 2 : 0;
        for (int i = 0; i < 2; i++)
            std::memcpy(
                args.array<float>(5 + i) + row * half, args.array<float>(from + i) + row * half, half * sizeof(float));
    });
}

// Rotates each pair (i, i + half) of every head by its angle: x (N, H, D) -> out. The dims from 2 half on stay as they
// are. Row n takes the angles of row n % period. Args: x, its stride, out, cosines (period, half), sines, N, H, D,
// period, half.
template <class Number>
void rotate(Args args, long task, long num_tasks) {
    const long heads = args.integer(6), size = args.integer(7), period = args.integer(8), half = args.integer(9);
    const StridedRows<Number> x = {args.array<Number>(0), args.integer(1), heads * size};
    const StridedRows<Number> out = {args.array<Number>(2), x.size, x.size};
    for_each_row(args.integer(5), task, num_tasks, [&](long row) {
        const float* const cosines = args.array<float>(3) + row % period * half;
        const float* const sines = args.array<float>(4) + row % period * half;
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

// out (N, size) = activation(pre), times `linear` if there is one. Args: pre, its stride, linear (or 0), its stride,
// out, N, size.
template <class Number, Floats (*activation)(Floats)>
void activate(Args args, long task, long num_tasks) {
    const long size = args.integer(6), vectors = (size + WIDTH - 1) / WIDTH;
    const StridedRows<Number> pre = {args.array<Number>(0), args.integer(1), size};
    const StridedRows<Number> out = {args.array<Number>(4), size, size};
    const StridedRows<Number> linear = {args.array<Number>(2), args.integer(3), size};
    const long count = args.integer(5) * vectors;
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
// are wanted. Args: x, probabilities (or 0), log_totals, N, size.
template <class Number>
void distribution(Args args, long task, long num_tasks) {
    const long size = args.integer(4);
    for_each_row(args.integer(3), task, num_tasks, [&](long row) {
        const Number* x = args.array<Number>(0) + row * size;
        float* const probabilities = args.array<float>(1) ? args.array<float>(1) + row * size : nullptr;
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
        args.array<float>(2)[row] = shift + std::log(total);
        if (probabilities)
            for_each_vector(size, [&](long i, Mask mask) {
                store(probabilities + i, load(probabilities + i, mask) / broadcast(total), mask);
            });
    });
}

// The maximum of each row, NaN if the row has a NaN, and the index of its first occurrence. Numbers that a bitmask
// excludes count as -inf. Args: x (N, size), values (N) float32, indices (N) int64, N, size, bitmasks (N, W) or null, W.
template <class Number>
void argmax(Args args, long task, long num_tasks) {
    const long size = args.integer(4);
    for_each_row(args.integer(3), task, num_tasks, [&](long row) {
        const Number* x = args.array<Number>(0) + row * size;
        const Bitmask bitmask = Bitmask{args.array<uint32_t>(5), args.integer(6)}.row(row);
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
        args.array<float>(1)[row] = count_lanes(is_nan_lane) ? NAN : value;
        args.array<int64_t>(2)[row] = reduce_min(indices);
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

// A tensor to be summarized: `count` numbers, in rows of `size` numbers that lie `stride` numbers apart.
struct Layout {
    int64_t address, count, stride, size;

    static constexpr long CHUNK = 1 << 14;  // numbers: as in model/ops/cpu/cpu_summaries.py
    long num_chunks() const { return (count + CHUNK - 1) / CHUNK; }
};

// The moments of each chunk of N tensors. Args: layouts (N), moments of all chunks, one tensor after the other, N.
template <class Number>
void moments(Args args, long task, long num_tasks) {
    constexpr long SPAN = 256 * WIDTH;  // numbers whose moments are computed in float32, then added in float64
    const Layout* const layouts = args.array<Layout>(0);
    long total = 0, index = 0;
    for (long n = 0; n < args.integer(2); n++) total += layouts[n].num_chunks();
    for (long n = 0; n < args.integer(2); n++) {
        const Layout& at = layouts[n];
        const StridedRows<Number> x = {(Number*)at.address, at.stride, at.size};
        for (long begin = 0; begin < at.count; begin += Layout::CHUNK, index++) {
            if (index < total * task / num_tasks || index >= total * (task + 1) / num_tasks) continue;
            Moments& all = args.array<Moments>(1)[index] = {};
            for (long next, i = begin, end = std::min(begin + Layout::CHUNK, at.count); i < end; i = next) {
                next = std::min({i + SPAN, (i / at.size + 1) * at.size, end});
                all.add(moments_of<true>(x[i / at.size] + i % at.size, next - i));
            }
        }
    }
}

// Combines the moments of the chunks of N tensors. For each tensor: minimum, maximum, mean, standard deviation, L2
// norm, and how many numbers are not finite. Args: layouts (N), moments of all chunks, summaries (N, 6) float64, N.
void summaries(Args args) {
    const Layout* const layouts = args.array<Layout>(0);
    const Moments* chunk = args.array<Moments>(1);
    for (long n = 0; n < args.integer(3); n++) {
        Moments all;
        for (const Moments* const end = chunk + layouts[n].num_chunks(); chunk < end; chunk++) all.add(*chunk);
        const double squares = std::max(0.0, all.squares);
        const double summary[] = {all.minimum, all.maximum, all.mean, std::sqrt(squares / all.count),
                                  std::sqrt(squares + all.count * all.mean * all.mean), layouts[n].count - all.count};
        std::memcpy(args.array<double>(2) + 6 * n, summary, sizeof summary);
    }
}

}  // namespace

KERNEL(summaries_float32) { summaries(args); }
KERNEL(rotation_float32) { rotation(args, task, num_tasks); }
KERNEL(select_rotation_float32) { select_rotation(args, task, num_tasks); }

#define KERNELS(Number, dtype)                                                                    \
    KERNEL(take_rows_##dtype) { take_rows<Number>(args, task, num_tasks); }                       \
    KERNEL(write_rows_##dtype) { write_rows<Number>(args, task, num_tasks); }                     \
    KERNEL(add_##dtype) { add<Number>(args, task, num_tasks); }                                   \
    KERNEL(scale_##dtype) {                                                                       \
        map_numbers<Number>(args, task, num_tasks, [](Floats x, Floats factor) { return factor * x; }); \
    }                                                                                             \
    KERNEL(softcap_##dtype) { map_numbers<Number>(args, task, num_tasks, softcap); }              \
    KERNEL(norm_##dtype) { norm<Number>(args, task, num_tasks); }                                 \
    KERNEL(rotate_##dtype) { rotate<Number>(args, task, num_tasks); }                             \
    KERNEL(argmax_##dtype) { argmax<Number>(args, task, num_tasks); }                             \
    KERNEL(distribution_##dtype) { distribution<Number>(args, task, num_tasks); }                 \
    KERNEL(moments_##dtype) { moments<Number>(args, task, num_tasks); }                           \
    KERNEL(silu_##dtype) { activate<Number, silu>(args, task, num_tasks); }                       \
    KERNEL(gelu_##dtype) { activate<Number, gelu>(args, task, num_tasks); }                       \
    KERNEL(gelu_tanh_##dtype) { activate<Number, gelu_tanh>(args, task, num_tasks); }             \
    KERNEL(relu_##dtype) { activate<Number, relu>(args, task, num_tasks); }

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
