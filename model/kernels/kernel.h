// What all kernels share: their arguments, their part of the work, what more than one computes.
//
// A kernel is a function of an array of 64-bit values (addresses, sizes, numbers) that does one of the parts into which
// one operation is divided. `run` (in run.cpp) runs all parts of a list of such calls. No result depends on the
// division.

#pragma once

#include "vector.h"

// Loops over registers: where one is left as a loop, all of them lie in memory.
#define UNROLL _Pragma("GCC unroll 16")

#define KERNEL(name) extern "C" void name(Arguments given, long part, long num_parts)

struct Arguments {
    const int64_t* values;

    template <class T>
    T* array(int index) const {
        return reinterpret_cast<T*>(values[index]);
    }
    long size(int index) const { return values[index]; }
    float number(int index) const {
        double number;
        std::memcpy(&number, values + index, sizeof number);
        return number;
    }
};

// e^x to the last bit or two: 2^n e^r with |r| <= ln 2 / 2, and e^r by its series up to r^7 / 7!. NaN stays.
inline Floats exponential(Floats x) {
    x = max(set(-104.0f), x);  // below, it is 0
    x = min(set(104.0f), x);   // above, it is infinite
    const Floats n = round(x * set(1.44269504f));
    Floats r = fma(n, set(-0.693145752f), x);  // ln 2 in two parts
    r = fma(n, set(-1.42860677e-6f), r);
    Floats sum = set(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = fma(sum, r, set(factor));
    return times_power_of_two(sum, n);
}
