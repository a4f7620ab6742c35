// Edits of stages: copies of a stage in which some rows are changed, and attention with a changed pattern.
//
// Each result is computed in float32 and rounded once to the dtype of the stage. A row is computed from its own numbers,
// in an order that its length decides, so no bit of it depends on the other rows. A task has some of the rows.

#include <cmath>

#include "rows.h"

namespace {

// What an edit makes of a vector x: `EditRule` in model/ops/row_edits.py, in the order of KINDS in cpu_edits.py.
enum Kind : long { SET, ADD, SCALE, CAP, PROJECT, CAP_COMPONENT };

// NaN stays NaN.
Floats limit(Floats x, Floats low, Floats high) { return min(high, max(low, x)); }

// Changes a vector x of `size` numbers in place. v is null if the rule takes none; then `first` is the number to set or
// to add.
template <class Number>
void apply_rule(long kind, float first, float second, const float* v, Number* x, long size) {
    const auto map = [&](auto operation) {
        for_each_vector(size, [&](long i, Mask mask) {
            store(x + i, operation(load(x + i, mask), v ? load(v + i, mask) : broadcast(first)), mask);
        });
    };
    const Floats low = broadcast(first), high = broadcast(second);
    if (kind == SET) return map([](Floats, Floats operand) { return operand; });
    if (kind == ADD) return map([](Floats old, Floats operand) { return old + operand; });
    if (kind == SCALE) return map([&](Floats old, Floats) { return old * low; });
    if (kind == CAP) return map([&](Floats old, Floats) { return limit(old, low, high); });
    Floats products = Floats{};
    for_each_vector(size, [&](long i, Mask mask) { products = fma(load(x + i, mask), load(v + i, mask), products); });
    const Floats component = broadcast(reduce_add(products));
    const Floats wanted = kind == PROJECT ? component * low : limit(component, low, high);
    const Floats difference = wanted - component;
    map([&](Floats old, Floats direction) { return fma(difference, direction, old); });
}

// Edits rows of x (T, H, size) in place. Args: x, rows (N), N, H, size, heads (h) or null, h, vectors or null, places (N)
// or null, the strides of the vectors from place to place and from head to head, kind, first, second.
template <class Number>
void edit_rows(Args args, long task, long num_tasks) {
    const long H = args.integer(3), size = args.integer(4), num_edited = args.integer(6);
    const int64_t *rows = args.array<int64_t>(1), *heads = args.array<int64_t>(5), *places = args.array<int64_t>(8);
    const float* const vectors = args.array<float>(7);
    for_each_row(args.integer(2) * num_edited, task, num_tasks, [&](long index) {
        const long row = index / num_edited, head = index % num_edited;
        Number* const x = args.array<Number>(0) + (rows[row] * H + (heads ? heads[head] : head)) * size;
        const long place = places ? places[row] : 0;
        const float* const v = vectors ? vectors + place * args.integer(9) + head * args.integer(10) : nullptr;
        apply_rule(args.integer(11), args.real(12), args.real(13), v, x, size);
    });
}

// Copies rows: out (N, size), contiguous, from x, whose rows are `stride` numbers apart. Args: x, stride, out, N, size.
template <class Number>
void copy_rows(Args args, long task, long num_tasks) {
    const StridedRows<Number> x = {args.array<Number>(0), args.integer(1), args.integer(4)};
    const StridedRows<Number> out = {args.array<Number>(2), x.size, x.size};
    for_each_row(args.integer(3), task, num_tasks, [&](long row) {
        std::memcpy(out[row], x[row], x.size * sizeof(Number));
    });
}

// Averages the values of the keys with the weights of a pattern: pattern (H, T, S) float32, v (S, Hkv, D) -> out (T, H,
// D). Keys of weight 0 are skipped, so values behind the last visible key do not matter. Args: pattern, v, its stride,
// out, T, H, Hkv, D, S.
template <class Number>
void apply_pattern(Args args, long task, long num_tasks) {
    const long stride = args.integer(2), T = args.integer(4), H = args.integer(5), D = args.integer(7);
    const long group = H / args.integer(6), S = args.integer(8);
    for_each_row(T * H, task, num_tasks, [&](long row) {
        const long token = row / H, head = row % H;
        const float* const weights = args.array<float>(0) + (head * T + token) * S;
        const Number* const values = args.array<Number>(1) + head / group * D;
        for_each_vector(D, [&](long i, Mask mask) {
            Floats sum = Floats{};
            for (long key = 0; key < S; key++)
                if (weights[key] != 0) sum = fma(broadcast(weights[key]), load(values + key * stride + i, mask), sum);
            store(args.array<Number>(3) + row * D + i, sum, mask);
        });
    });
}

}  // namespace

#define KERNELS(Number, dtype)                                                    \
    KERNEL(edit_rows_##dtype) { edit_rows<Number>(args, task, num_tasks); }       \
    KERNEL(copy_rows_##dtype) { copy_rows<Number>(args, task, num_tasks); }       \
    KERNEL(apply_pattern_##dtype) { apply_pattern<Number>(args, task, num_tasks); }

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
