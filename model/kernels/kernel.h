// What all kernels share: their arguments, their part of the work, vectors of 16 numbers in float32.
//
// A kernel is a function of an array of 64-bit values (addresses, sizes, numbers) that does one of the parts into which
// one operation is divided. `run` (in run.cpp) runs all parts of a list of such calls. No result depends on the
// division.

#pragma once

#ifndef __AVX512F__
#error "the CPU has no AVX-512"
#endif

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

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

constexpr int WIDTH = 16;  // numbers in a vector
using BFloat16 = uint16_t;

inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load(const float* from, __mmask16 which) { return _mm512_maskz_loadu_ps(which, from); }
inline void store(float* to, __m512 values) { _mm512_storeu_ps(to, values); }
inline void store(float* to, __m512 values, __mmask16 which) { _mm512_mask_storeu_ps(to, which, values); }

#ifdef __AVX512BF16__
inline __m512 widen(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}
inline __m512 load(const BFloat16* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }
inline __m512 load(const BFloat16* from, __mmask16 which) { return widen(_mm256_maskz_loadu_epi16(which, from)); }
inline void store(BFloat16* to, __m512 values) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(values));
}
inline void store(BFloat16* to, __m512 values, __mmask16 which) {
    _mm256_mask_storeu_epi16(to, which, (__m256i)_mm512_cvtneps_pbh(values));
}
#endif

// The first `count` of a vector's numbers, at most all.
inline __mmask16 first_of(long count) { return count >= WIDTH ? 0xffff : (1 << std::max(count, 0L)) - 1; }

// e^x to the last bit or two: 2^n e^r with |r| <= ln 2 / 2, and e^r by its series up to r^7 / 7!. NaN stays.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // below, it is 0
    x = _mm512_min_ps(_mm512_set1_ps(104.0f), x);   // above, it is infinite
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);  // ln 2 in two parts
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(sum, n);
}
