// Vectors of 16 numbers as two registers of AVX2 (with FMA and F16C): see simd.h.

#pragma once

#include <immintrin.h>

constexpr bool HAS_AVX512 = false;

typedef uint32_t Integers8 __attribute__((vector_size(32)));
typedef int32_t Mask8 __attribute__((vector_size(32)));
using Floats = Pair<__m256>;
using Integers = Pair<Integers8>;
using Mask = Pair<Mask8>;

inline Floats broadcast(float number) { return {_mm256_set1_ps(number), _mm256_set1_ps(number)}; }
inline Integers broadcast_integer(uint32_t number) {
    return {(Integers8)_mm256_set1_epi32(number), (Integers8)_mm256_set1_epi32(number)};
}
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats a) { _mm256_storeu_ps(to, a.low), _mm256_storeu_ps(to + 8, a.high); }
inline Integers load_integers(const void* from) {
    const __m256i* const halves = (const __m256i*)from;
    return {(Integers8)_mm256_loadu_si256(halves), (Integers8)_mm256_loadu_si256(halves + 1)};
}

// Operations on half of a vector: BY_HALVES (simd.h) makes those on vectors.
inline __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256 max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
inline __m256 min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
inline __m256 as_floats(Integers8 bits) { return (__m256)bits; }
inline Integers8 as_bits(__m256 a) { return (Integers8)a; }
inline __m256 abs(__m256 a) { return as_floats(as_bits(a) & 0x7fffffff); }
inline __m256 round(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT); }
inline __m256 to_floats(Integers8 a) { return _mm256_cvtepi32_ps((__m256i)a); }
inline Integers8 to_integers(__m256 a) { return (Integers8)_mm256_cvtps_epi32(a); }
inline Mask8 is_greater(__m256 a, __m256 b) { return (Mask8)_mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Mask8 is_greater_or_equal(__m256 a, __m256 b) { return (Mask8)_mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline Mask8 is_equal(__m256 a, __m256 b) { return (Mask8)_mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline Mask8 is_nan(__m256 a) { return (Mask8)_mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline __m256 select(Mask8 mask, __m256 a, __m256 b) { return _mm256_blendv_ps(b, a, (__m256)mask); }
inline Integers8 select(Mask8 mask, Integers8 a, Integers8 b) {
    return as_bits(select(mask, as_floats(a), as_floats(b)));
}

template <class Reduce>
inline auto reduce(Reduce combine, __m256 a) {  // in the same order as AVX-512's reductions
    const __m128 four = combine(_mm256_extractf128_ps(a, 1), _mm256_castps256_ps128(a));
    const __m128 two = combine(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(combine(two, _mm_movehdup_ps(two)));
}
inline float reduce_add(Floats a) { return reduce([](__m128 x, __m128 y) { return x + y; }, a.high + a.low); }
inline float reduce_max(Floats a) {
    return reduce([](__m128 x, __m128 y) { return _mm_max_ps(x, y); }, _mm256_max_ps(a.high, a.low));
}
inline float reduce_min(Floats a) {
    return reduce([](__m128 x, __m128 y) { return _mm_min_ps(x, y); }, _mm256_min_ps(a.high, a.low));
}
inline uint32_t reduce_min(Integers a) {
    uint32_t all[WIDTH];
    std::memcpy(all, &a, sizeof all);
    return *std::min_element(all, all + WIDTH);
}

inline Mask first_lanes(long count) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int clamped = std::clamp(count, 0L, 16L);
    return {(Mask8)_mm256_cmpgt_epi32(_mm256_set1_epi32(clamped), index),
            (Mask8)_mm256_cmpgt_epi32(_mm256_set1_epi32(clamped - 8), index)};
}
inline Mask lanes_of(uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i low = _mm256_set1_epi32(bits), high = _mm256_set1_epi32(bits >> 8);
    return {(Mask8)_mm256_cmpeq_epi32(_mm256_and_si256(low, bit), bit),
            (Mask8)_mm256_cmpeq_epi32(_mm256_and_si256(high, bit), bit)};
}
inline int to_bits(Mask mask) {
    return _mm256_movemask_ps((__m256)mask.low) | _mm256_movemask_ps((__m256)mask.high) << 8;
}
inline int count_lanes(Mask mask) { return _mm_popcnt_u32(to_bits(mask)); }

inline Floats load(const float* from, Mask mask) {
    check_access(from, to_bits(mask));
    return {_mm256_maskload_ps(from, (__m256i)mask.low), _mm256_maskload_ps(from + 8, (__m256i)mask.high)};
}
inline void store(float* to, Floats a, Mask mask) {
    if (to_bits(mask) == 0xffff) return store(to, a);
    check_access(to, to_bits(mask));
    _mm256_maskstore_ps(to, (__m256i)mask.low, a.low);
    _mm256_maskstore_ps(to + 8, (__m256i)mask.high, a.high);
}
// AVX2 has no masked loads and stores of 8 or 16 bits. Here `mask` always selects the first lanes.
inline Integers load_uint16(const uint16_t* from) {
    const __m128i* const halves = (const __m128i*)from;
    return {(Integers8)_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)),
            (Integers8)_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
}
inline Integers load_uint16(const uint16_t* from, Mask mask) {
    if (to_bits(mask) == 0xffff) return load_uint16(from);
    uint16_t all[WIDTH] = {};
    std::memcpy(all, from, count_lanes(mask) * sizeof *from);
    return load_uint16(all);
}
inline void store_uint16(uint16_t* to, Integers a) {
    const __m256i packed = _mm256_packus_epi32((__m256i)a.low, (__m256i)a.high);
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_uint16(uint16_t* to, Integers a, Mask mask) {
    if (to_bits(mask) == 0xffff) return store_uint16(to, a);
    uint16_t all[WIDTH];
    store_uint16(all, a);
    std::memcpy(to, all, count_lanes(mask) * sizeof *to);
}
inline void store_int8(int8_t* to, Integers a, Mask mask) {
    const __m256i packed = _mm256_packs_epi32((__m256i)a.low, (__m256i)a.high);
    const __m256i words = _mm256_permute4x64_epi64(packed, 0xd8);
    const __m128i all = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    std::memcpy(to, &all, count_lanes(mask));
}
inline Integers load_uint8(const uint8_t* from) {
    return {(Integers8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)),
            (Integers8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))};
}
inline Integers load_int8(const int8_t* from) {
    return {(Integers8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)),
            (Integers8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))};
}
inline Floats load_float16(const uint16_t* from) {
    const __m128i* const halves = (const __m128i*)from;
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline void store_float16(uint16_t* to, Floats a) {
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)to + 1, _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}

#ifdef __AVXVNNI__
inline Integers8 add_byte_products(Integers8 sum, Integers8 w, Integers8 x) {
    return (Integers8)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
BY_HALVES(add_byte_products)
#else
// Two sums in each lane, in 16 bits: the products of the lane's unsigned bytes of w and signed bytes of x, two by two.
inline Integers8 multiply_bytes(Integers8 w, Integers8 x) {
    return (Integers8)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
}
inline Integers8 add_halves(Integers8 a, Integers8 b) { return (Integers8)_mm256_add_epi16((__m256i)a, (__m256i)b); }
// Adds both halves of a lane of `halves` to the lane of `sum`.
inline Integers8 add_both_halves(Integers8 sum, Integers8 halves) {
    return sum + (Integers8)_mm256_madd_epi16((__m256i)halves, _mm256_set1_epi16(1));
}
// Computes `a` here: otherwise GCC adds many numbers as a tree, which needs more registers than there are.
inline void keep_order(Integers& a) { asm("" : "+x"(a.low), "+x"(a.high)); }
inline Integers8 abs_bytes(Integers8 a) { return (Integers8)_mm256_abs_epi8((__m256i)a); }
// Each byte of x, times the sign of the byte of `sign`: 1, 0 or -1.
inline Integers8 copy_byte_signs(Integers8 x, Integers8 sign) {
    return (Integers8)_mm256_sign_epi8((__m256i)x, (__m256i)sign);
}
BY_HALVES(multiply_bytes)
BY_HALVES(add_halves)
BY_HALVES(add_both_halves)
BY_HALVES(abs_bytes)
BY_HALVES(copy_byte_signs)
#endif

// Writes the columns of a matrix of 16 rows and 16 columns, one after the other: as four matrices of 8 by 8.
inline void transpose(Floats (&rows)[WIDTH], float* to) {
    for (int first_row = 0; first_row < WIDTH; first_row += 8)
        for (int half = 0; half < 2; half++) {
            __m256 square[8], other[8];
            for (int i = 0; i < 8; i++) square[i] = half ? rows[first_row + i].high : rows[first_row + i].low;
            for (int i = 0; i < 8; i += 2) {
                other[i] = _mm256_unpacklo_ps(square[i], square[i + 1]);
                other[i + 1] = _mm256_unpackhi_ps(square[i], square[i + 1]);
            }
            for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                    square[i + 2 * j] = _mm256_shuffle_ps(other[i + j], other[i + j + 2], 0x44);
                    square[i + 2 * j + 1] = _mm256_shuffle_ps(other[i + j], other[i + j + 2], 0xee);
                }
            for (int i = 0; i < 4; i++) {
                float* const column = to + (half * 8 + i) * WIDTH + first_row;
                _mm256_storeu_ps(column, _mm256_permute2f128_ps(square[i], square[i + 4], 0x20));
                _mm256_storeu_ps(column + 4 * WIDTH, _mm256_permute2f128_ps(square[i], square[i + 4], 0x31));
            }
        }
}
