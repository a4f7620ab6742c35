// The operations between the matrix products of a network: embedding lookup, sums, norms, rotary positions,
// activations, and writing keys and values to the cache.
//
// Tensors are rows of numbers. Each result is computed in float32 and rounded once to the dtype of the tensor. A task
// has some of the rows (where each number is computed from numbers at its own place: some of the vectors). A row is
// computed from its own numbers, in an order that its length decides, so no bit of it depends on the other rows.

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

}  // namespace

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
    KERNEL(silu_##dtype, activate<Number, silu>)                  \
    KERNEL(gelu_##dtype, activate<Number, gelu>)                  \
    KERNEL(gelu_tanh_##dtype, activate<Number, gelu_tanh>)        \
    KERNEL(relu_##dtype, activate<Number, relu>)

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
