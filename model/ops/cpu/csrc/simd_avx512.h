// Vectors of 16 numbers as one register of AVX-512 (F, BW, DQ and VL): see simd.h.

#pragma once

#include <immintrin.h>

constexpr bool HAS_AVX512 = true;  // AVX-512 has 32 registers of a vector each, AVX2 16 of half a vector each
using Floats = __m512;
typedef uint32_t Integers __attribute__((vector_size(64)));
using Mask = __mmask16;  // one bit for each lane

inline Floats broadcast(float number) { return _mm512_set1_ps(number); }
inline Integers broadcast_integer(uint32_t number) { return (Integers)_mm512_set1_epi32(number); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Mask mask) {  // other lanes: 0
    check_access(from, mask);
    return _mm512_maskz_loadu_ps(mask, from);
}
inline void store(float* to, Floats a) { _mm512_storeu_ps(to, a); }
inline void store(float* to, Floats a, Mask mask) {
    check_access(to, mask);
    _mm512_mask_storeu_ps(to, mask, a);
}
inline Integers load_integers(const void* from) { return (Integers)_mm512_loadu_si512(from); }

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c, rounded once
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }                 // b if either is NaN
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
inline Floats times_power_of_two(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }
inline float reduce_add(Floats a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(Floats a) { return _mm512_reduce_max_ps(a); }
inline float reduce_min(Floats a) { return _mm512_reduce_min_ps(a); }
inline uint32_t reduce_min(Integers a) { return _mm512_reduce_min_epu32((__m512i)a); }

inline Mask first_lanes(long count) { return count >= WIDTH ? 0xffff : (1 << std::max(count, 0L)) - 1; }
inline Mask lanes_of(uint32_t bits) { return bits; }  // one bit for each lane
inline Mask is_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask is_greater_or_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask is_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline int count_lanes(Mask mask) { return _mm_popcnt_u32(mask); }
inline Floats select(Mask mask, Floats a, Floats b) { return _mm512_mask_mov_ps(b, mask, a); }
inline Integers select(Mask mask, Integers a, Integers b) {
    return (Integers)_mm512_mask_mov_epi32((__m512i)b, mask, (__m512i)a);
}

inline Floats as_floats(Integers bits) { return (Floats)bits; }
inline Integers as_bits(Floats a) { return (Integers)a; }
inline Floats to_floats(Integers a) { return _mm512_cvtepi32_ps((__m512i)a); }  // signed integers
inline Integers to_integers(Floats a) { return (Integers)_mm512_cvtps_epi32(a); }
inline void store_int8(int8_t* to, Integers a, Mask mask) {  // saturated
    check_access(to, mask);
    _mm_mask_storeu_epi8(to, mask, _mm512_cvtsepi32_epi8((__m512i)a));
}

// Numbers of 16 bits, widened to 32 bits: unsigned integers, and float16 numbers.
inline Integers load_uint16(const uint16_t* from) {
    return (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
inline Integers load_uint16(const uint16_t* from, Mask mask) {
    check_access(from, mask);
    return (Integers)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
}
inline void store_uint16(uint16_t* to, Integers a) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)a));
}
inline void store_uint16(uint16_t* to, Integers a, Mask mask) {
    check_access(to, mask);
    _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16((__m512i)a));
}
// Bytes, widened to 32 bits.
inline Integers load_uint8(const uint8_t* from) {
    return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}
inline Integers load_int8(const int8_t* from) {
    return (Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
}
inline Floats load_float16(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
inline void store_float16(uint16_t* to, Floats a) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Adds to each lane of `sum` the four products of the lane's unsigned bytes of w and signed bytes of x.
inline Integers add_byte_products(Integers sum, Integers w, Integers x) {
#ifdef __AVX512VNNI__
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else  // in 16 bits: first the products of the even bytes, then those of the odd bytes
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8);
    const __m512i odd = _mm512_srai_epi16((__m512i)x, 8);
    sum += (Integers)_mm512_madd_epi16(_mm512_and_si512((__m512i)w, _mm512_set1_epi16(0xff)), even);
    return sum + (Integers)_mm512_madd_epi16(_mm512_srli_epi16((__m512i)w, 8), odd);
#endif
}

#ifdef __AVX512BF16__
#define HAS_PAIR_PRODUCTS

// Adds to each lane of `sum` both products of the lane's pairs of bfloat16 numbers.
inline Floats add_pair_products(Floats sum, Integers a, Integers b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
// The first 16 numbers of 16 bits; the others are 0.
inline Integers load_lower_half(const void* from) {
    return (Integers)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)from));
}
inline Integers lane_indices();
// The first, or the last, 16 numbers of 16 bits of both, in turn.
inline Integers interleave_lower(Integers even, Integers odd) {
    const Integers order = lane_indices() * 0x10001 + 0x200000;
    return (Integers)_mm512_permutex2var_epi16((__m512i)even, (__m512i)order, (__m512i)odd);
}
inline Integers interleave_upper(Integers even, Integers odd) {
    const Integers order = lane_indices() * 0x10001 + 0x300010;
    return (Integers)_mm512_permutex2var_epi16((__m512i)even, (__m512i)order, (__m512i)odd);
}
#endif

// Writes the columns of a matrix of 16 rows and 16 columns, one after the other.
[[gnu::always_inline]] inline void transpose(Floats (&rows)[WIDTH], float* to) {
    Floats other[WIDTH];
    for (int i = 0; i < WIDTH; i += 2) {
        other[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < WIDTH; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(other[i + j]), high = _mm512_castps_pd(other[i + j + 2]);
            rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            other[8 * half + i] = _mm512_shuffle_f32x4(rows[8 * half + i], rows[8 * half + i + 4], 0x88);
            other[8 * half + i + 4] = _mm512_shuffle_f32x4(rows[8 * half + i], rows[8 * half + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        store(to + i * WIDTH, _mm512_shuffle_f32x4(other[i], other[i + 8], 0x88));
        store(to + (i + 8) * WIDTH, _mm512_shuffle_f32x4(other[i], other[i + 8], 0xdd));
    }
}
