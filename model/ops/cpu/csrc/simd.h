// Vectors of 16 numbers of 32 bits: one register of AVX-512, two of AVX2 (with FMA and F16C), or four of NEON.
//
// The instruction set is chosen when a kernel is compiled. On float32 numbers and on bytes, all implementations give
// the same bits. bfloat16 numbers are widened to float32 when they are loaded, and rounded when they are stored.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int WIDTH = 16;  // lanes of a vector: VECTOR_WIDTH in model/ops/cpu/constants.py
using BFloat16 = uint16_t;

// AddressSanitizer does not see what the intrinsics for masked loads and stores access. If it is used, this reads each
// number whose bit is set, so that it sees the same accesses.
template <class Number>
inline void check_access(const Number* numbers, uint32_t bits) {
#ifdef __SANITIZE_ADDRESS__
    for (int i = 0; i < 32; i++)
        if (bits >> i & 1) static_cast<void>(*static_cast<const volatile Number*>(numbers + i));
#endif
}

// A vector in two halves of the same kind.
template <class Half>
struct Pair {
    Half low, high;

    Pair operator+(Pair other) const { return {low + other.low, high + other.high}; }
    Pair operator-(Pair other) const { return {low - other.low, high - other.high}; }
    Pair operator*(Pair other) const { return {low * other.low, high * other.high}; }
    Pair operator/(Pair other) const { return {low / other.low, high / other.high}; }
    Pair operator&(Pair other) const { return {low & other.low, high & other.high}; }
    Pair operator|(Pair other) const { return {low | other.low, high | other.high}; }
    Pair operator^(Pair other) const { return {low ^ other.low, high ^ other.high}; }
    Pair operator>>(int bits) const { return {low >> bits, high >> bits}; }
    Pair operator<<(int bits) const { return {low << bits, high << bits}; }
};

// Defines an operation on pairs, which the operation on halves that has the same name computes.
#define BY_HALVES(operation)                                                                             \
    template <class Half, class... Others>                                                               \
    inline auto operation(Pair<Half> first, Others... others) {                                          \
        using Result = decltype(operation(first.low, others.low...));                                    \
        return Pair<Result>{operation(first.low, others.low...), operation(first.high, others.high...)}; \
    }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "simd_neon.h"
#else
#error "the CPU has neither AVX-512, nor AVX2 with FMA, nor NEON of 64 bits"
#endif

#ifndef __AVX512F__
BY_HALVES(fma)
BY_HALVES(max)
BY_HALVES(min)
BY_HALVES(abs)
BY_HALVES(round)
BY_HALVES(as_floats)
BY_HALVES(as_bits)
BY_HALVES(to_floats)
BY_HALVES(to_integers)
BY_HALVES(is_greater)
BY_HALVES(is_greater_or_equal)
BY_HALVES(is_equal)
BY_HALVES(is_nan)
BY_HALVES(select)
#endif

inline Integers lane_indices() {
    static constexpr uint32_t ALL[WIDTH] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_integers(ALL);
}

// bfloat16 is the upper half of float32.
inline float as_float(float number) { return number; }
inline float as_float(BFloat16 number) {
    const uint32_t bits = (uint32_t)number << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
inline Floats load(const BFloat16* from) { return as_floats(load_uint16(from) << 16); }
inline Floats load(const BFloat16* from, Mask mask) { return as_floats(load_uint16(from, mask) << 16); }

#ifndef __AVX512F__
inline Floats times_power_of_two(Floats a, Floats n) {  // |n| < 200. Two factors, since 2^n alone may overflow
    const Integers exponent = to_integers(n), half = to_integers(round(n * broadcast(0.5f)));
    const Integers bias = broadcast_integer(127);
    return a * as_floats((half + bias) << 23) * as_floats((exponent - half + bias) << 23);
}
#endif

// The upper half of each number, rounded to nearest, ties to even. NaN stays NaN if its lower 16 bits are 0, as if the
// processor made it or it was widened from bfloat16: then the addition cannot carry into its upper half.
inline Integers to_bfloat16(Floats a) {
    const Integers bits = as_bits(a), is_odd = bits >> 16 & broadcast_integer(1);
    return (bits + is_odd + broadcast_integer(0x7fff)) >> 16;
}

#ifdef __AVX512BF16__
inline void store(BFloat16* to, Floats a) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(a)); }
inline void store(BFloat16* to, Floats a, Mask mask) {
    check_access(to, mask);
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(a));
}
#else
inline void store(BFloat16* to, Floats a) { store_uint16(to, to_bfloat16(a)); }
inline void store(BFloat16* to, Floats a, Mask mask) { store_uint16(to, to_bfloat16(a), mask); }
#endif
