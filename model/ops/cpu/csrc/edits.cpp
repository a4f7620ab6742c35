// Edits of stages: copies of a stage in which some rows are changed, and attention with a changed pattern.
//
// Each result is computed in float32 and rounded once to the dtype of the stage. A row is computed from its own numbers,
// in an order that its length decides, so no bit of it depends on the other rows. A task has some of the rows.

#include <cmath>

#include "rows.h"

namespace {

// What an edit makes of a vector x: `EditRule` in model/ops/row_edits.py.
constexpr long SET = 0, ADD = 1, SCALE = 2, CAP = 3, PROJECT = 4, CAP_COMPONENT = 5;

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

// One edit of rows. `vector_stride` is that of the vectors from place to place, `head_stride` that from head to head.
STRUCT(
    RowEdit,
    (const int64_t*, heads),  // (num_heads), or null for all heads
    (const float*, vectors),  // or null
    (long, num_heads),
    (long, vector_stride),
    (long, head_stride),
    (long, is_per_number),  // whether each number of a row counts as a head
    (long, kind),
    (double, first),
    (double, second));

// Edits N rows of x (T, H, size) in place. In memory, `num_edits` structs `RowEdit` follow the arguments: the edits of
// each row, one after the other.
template <class Number>
STRUCT(
    EditRowsArguments,
    (Number*, x),
    (const int64_t*, rows),            // (N)
    (const int64_t*, vector_indices),  // (N): which vector belongs to each row; or null for the first one
    (long, num_rows),
    (long, num_heads),
    (long, size),
    (long, num_edits));

template <class Number>
void edit_rows(const EditRowsArguments<Number>& args, long task, long num_tasks) {
    const RowEdit* const edits = reinterpret_cast<const RowEdit*>(&args + 1);
    for_each_row(args.num_rows, task, num_tasks, [&](long index) {
        Number* const row = args.x + args.rows[index] * args.num_heads * args.size;
        const long vector = args.vector_indices ? args.vector_indices[index] : 0;
        for (const RowEdit* edit = edits; edit < edits + args.num_edits; edit++) {
            const long size = edit->is_per_number ? 1 : args.size;
            const long num_heads = edit->heads ? edit->num_heads : args.num_heads * args.size / size;
            for (long head = 0; head < num_heads; head++) {
                const long offset = vector * edit->vector_stride + head * edit->head_stride;
                const float* const v = edit->vectors ? edit->vectors + offset : nullptr;
                Number* const x = row + (edit->heads ? edit->heads[head] : head) * size;
                apply_rule(edit->kind, edit->first, edit->second, v, x, size);
            }
        }
    });
}

// Copies rows: out (N, size), contiguous, from x, whose rows are `x_stride` numbers apart.
template <class Number>
STRUCT(CopyRowsArguments, (const Number*, x), (Number*, out), (long, num_rows), (long, size), (long, x_stride));

template <class Number>
void copy_rows(const CopyRowsArguments<Number>& args, long task, long num_tasks) {
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        std::memcpy(args.out + row * args.size, args.x + row * args.x_stride, args.size * sizeof(Number));
    });
}

// Averages the values of the keys with the weights of a pattern: pattern (H, T, S) float32, v (S, Hkv, D) -> out (T, H,
// D). Keys of weight 0 are skipped, so values behind the last visible key do not matter.
template <class Number>
STRUCT(
    ApplyPatternArguments,
    (const float*, pattern),
    (const Number*, v),
    (Number*, out),
    (long, T),
    (long, H),
    (long, Hkv),
    (long, D),
    (long, S),
    (long, v_stride));

template <class Number>
void apply_pattern(const ApplyPatternArguments<Number>& args, long task, long num_tasks) {
    const long T = args.T, H = args.H, D = args.D, S = args.S, group = H / args.Hkv;
    for_each_row(T * H, task, num_tasks, [&](long row) {
        const long token = row / H, head = row % H;
        const float* const weights = args.pattern + (head * T + token) * S;
        const Number* const values = args.v + head / group * D;
        for_each_vector(D, [&](long i, Mask mask) {
            Floats sum = Floats{};
            for (long key = 0; key < S; key++)
                if (weights[key] != 0) sum = fma(broadcast(weights[key]), load(values + key * args.v_stride + i, mask), sum);
            store(args.out + row * D + i, sum, mask);
        });
    });
}

}  // namespace

EXPORT_CONSTANT(SET)
EXPORT_CONSTANT(ADD)
EXPORT_CONSTANT(SCALE)
EXPORT_CONSTANT(CAP)
EXPORT_CONSTANT(PROJECT)
EXPORT_CONSTANT(CAP_COMPONENT)

#define KERNELS(Number, dtype)                     \
    KERNEL(edit_rows_##dtype, edit_rows<Number>)   \
    KERNEL(copy_rows_##dtype, copy_rows<Number>)   \
    KERNEL(apply_pattern_##dtype, apply_pattern<Number>)

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)

EXPORT_DESCRIPTION(row_edit, RowEdit)
