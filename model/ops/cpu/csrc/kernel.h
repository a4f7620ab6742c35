// What all kernels share: how they take their arguments, how their work is divided, and functions that several use.
//
// A kernel computes one operation, such as a norm. It is a function of three arguments: a struct with addresses, sizes
// and numbers, and the index of a task among the `num_tasks` tasks into which this call is divided.
// `run_calls` of thread_pool.cpp runs all tasks of a call on several threads. A task writes only its own share of the
// outputs, and each output is computed in the same order of operations whatever the number of tasks, so no bit of a
// result depends on how a call is divided.

#pragma once

#include "shared_struct.h"
#include "simd.h"

// Unroll loops over arrays that must stay in registers: one loop that is not unrolled forces its array into memory.
#define UNROLL _Pragma("GCC unroll 16")

template <class Arguments>
using Kernel = void(const Arguments& args, long task, long num_tasks);

template <class Arguments>
Arguments arguments_of(Kernel<Arguments>*);

// Exports a kernel as the function `name`, and the description of its arguments as `name`_arguments.
#define KERNEL(name, ...)                                                                           \
    extern "C" void name(const void* arguments, long task, long num_tasks) {                        \
        using Arguments = decltype(arguments_of(__VA_ARGS__));                                      \
        static_cast<Kernel<Arguments>&>(__VA_ARGS__)(*static_cast<const Arguments*>(arguments), task, num_tasks); \
    }                                                                                               \
    EXPORT_DESCRIPTION(name##_arguments, decltype(arguments_of(__VA_ARGS__)))

// Which numbers of some rows count: bit i % 32 of word i / 32 of a row allows number i. Without words, all of them do.
struct Bitmask {
    const uint32_t* words;
    long words_per_row;

    Bitmask row(long index) const { return {words ? words + index * words_per_row : nullptr, words_per_row}; }

    // The lanes of the vector that begins at number i, a multiple of the vector's width.
    Mask lanes(long i) const { return lanes_of(words[i / 32] >> (i % 32) & 0xffff); }
};

// e^x, accurate except for the last bit or two: 2^n e^r with |r| <= ln 2 / 2, and e^r by its Taylor series up
// to r^7 / 7!. NaN stays NaN.
inline Floats exp(Floats x) {
    x = max(broadcast(-104.0f), x);  // e^x is 0 below
    x = min(broadcast(104.0f), x);   // e^x is infinite above
    const Floats n = round(x * broadcast(1.44269504f));
    Floats r = fma(n, broadcast(-0.693145752f), x);  // ln 2 as the sum of two floats
    r = fma(n, broadcast(-1.42860677e-6f), r);
    Floats sum = broadcast(1.0f / 5040);
    for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = fma(sum, r, broadcast(coefficient));
    return times_power_of_two(sum, n);
}

// c0 + c1 x + c2 x^2 + ...
template <int count>
Floats polynomial(const float (&coefficients)[count], Floats x) {
    Floats sum = broadcast(coefficients[count - 1]);
    for (int i = count - 2; i >= 0; i--) sum = fma(sum, x, broadcast(coefficients[i]));
    return sum;
}

inline Floats copy_sign(Floats magnitude, Floats sign) {
    return as_floats(as_bits(magnitude) | (as_bits(sign) & broadcast_integer(0x80000000)));
}

// tanh, with an error of about one unit in the last place: a polynomial near 0, otherwise by e^(-2|x|). The polynomial
// is a Chebyshev fit of tanh(x) / x in x^2. NaN stays NaN.
inline Floats tanh(Floats x) {
    constexpr float NEAR[] = {1.0f, -0.33333254f, 0.13330957f, -0.053707067f, 0.020544905f, -0.0056076888f};
    const Floats size = abs(x), one = broadcast(1.0f), power = exp(size * broadcast(-2.0f));
    const Floats far = copy_sign((one - power) / (one + power), x);
    return select(is_greater(broadcast(0.63f), size), x * polynomial(NEAR, x * x), far);
}

// cap tanh(x / cap)
inline Floats softcap(Floats x, Floats cap) { return cap * tanh(x / cap); }
