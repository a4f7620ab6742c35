// Keys and values in 8 bits: the numbers of one position and one key head are integers times a common scale.
//
// The scale is 1/127 of the row's magnitude: its largest absolute value, rounded to bfloat16. This is the C++ side of
// model/ops/quantized_rows.py, and gives the same bits.

#pragma once

#include <limits>

#include "rows.h"

constexpr float STEPS = 127.0f;             // integers are between -STEPS and STEPS
constexpr float SMALLEST_MAGNITUDE = 0x1p-100f;  // rows with a smaller one are zeros
constexpr BFloat16 MISSING = 0x7fc0;        // the magnitude of rows with numbers that are not finite: NaN

inline float scale_of(BFloat16 magnitude) { return as_float(magnitude) * (1.0f / STEPS); }

// Writes D numbers, a multiple of 16.
template <class Number>
inline void dequantize_row(const int8_t* integers, BFloat16 magnitude, Number* to, long D) {
    const Floats scale = broadcast(scale_of(magnitude));
    for (long d = 0; d < D; d += WIDTH) store(to + d, to_floats(load_int8(integers + d)) * scale);
}

// Writes D integers, a multiple of 16, and returns the magnitude.
template <class Number>
inline BFloat16 quantize_row(const Number* x, int8_t* integers, long D) {
    Floats largest = Floats{};
    bool is_finite = true;
    for (long d = 0; d < D; d += WIDTH) {
        const Floats number = load(x + d);
        is_finite = is_finite && !count_lanes(is_nan(number - number));
        largest = max(abs(number), largest);
    }
    BFloat16 rounded[WIDTH];
    store(rounded, broadcast(reduce_max(largest)));
    const float scale = scale_of(rounded[0]);
    is_finite = is_finite && scale <= std::numeric_limits<float>::max();
    if (!is_finite || scale < SMALLEST_MAGNITUDE * (1.0f / STEPS)) {
        std::fill(integers, integers + D, 0);
        return is_finite ? 0 : MISSING;
    }
    for (long d = 0; d < D; d += WIDTH)
        store_int8(integers + d, to_integers(load(x + d) / broadcast(scale)), first_lanes(WIDTH));
    return rounded[0];
}

// Quantizes k and v (num_rows, num_heads, D) to the slots (num_rows) of a cache.
template <class Number>
STRUCT(
    WriteQuantizedArguments,
    (const Number*, k),
    (const Number*, v),
    (int8_t*, keys),    // (slots, num_heads, D)
    (int8_t*, values),  // likewise
    (BFloat16*, key_magnitudes),    // (slots, num_heads)
    (BFloat16*, value_magnitudes),  // likewise
    (const int64_t*, slots),
    (long, num_rows),
    (long, num_heads),
    (long, D),
    (long, k_stride),
    (long, v_stride));

template <class Number>
void write_quantized(const WriteQuantizedArguments<Number>& args, long task, long num_tasks) {
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        for (long head = 0; head < args.num_heads; head++) {
            const long to = args.slots[row] * args.num_heads + head, from = head * args.D;
            args.key_magnitudes[to] = quantize_row(args.k + row * args.k_stride + from, args.keys + to * args.D, args.D);
            args.value_magnitudes[to] =
                quantize_row(args.v + row * args.v_stride + from, args.values + to * args.D, args.D);
        }
    });
}
