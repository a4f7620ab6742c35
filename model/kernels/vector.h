// 16 numbers of 32 bits in the registers of the CPU at hand: in one of AVX-512, or in two of AVX2 (with FMA and F16C).
// Of float32 and bytes both compute the same, to the bit.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int WIDTH = 16;
using BFloat16 = uint16_t;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

constexpr bool IS_WIDE = true;  // 32 registers of one vector each, not 16 of half of one
using Floats = __m512;
typedef uint32_t Integers __attribute__((vector_size(64)));
using Mask = __mmask16;  // some of the 16

inline Floats set(float number) { return _mm512_set1_ps(number); }
inline Integers set_integer(uint32_t number) { return (Integers)_mm512_set1_epi32(number); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Mask which) { return _mm512_maskz_loadu_ps(which, from); }  // the others are 0
inline void store(float* to, Floats a) { _mm512_storeu_ps(to, a); }
inline void store(float* to, Floats a, Mask which) { _mm512_mask_storeu_ps(to, which, a); }
inline Integers load_integers(const void* from) { return (Integers)_mm512_loadu_si512(from); }

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c, rounded once
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }                 // b where one is NaN
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
inline Floats times_power_of_two(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }
inline float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
inline float most_of(Floats a) { return _mm512_reduce_max_ps(a); }
inline float least_of(Floats a) { return _mm512_reduce_min_ps(a); }
inline uint32_t least_of(Integers a) { return _mm512_reduce_min_epu32((__m512i)a); }

inline Mask first_of(long count) { return count >= WIDTH ? 0xffff : (1 << std::max(count, 0L)) - 1; }
inline Mask is_more(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask is_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask is_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline int count_of(Mask which) { return _mm_popcnt_u32(which); }
inline Floats select(Mask which, Floats a, Floats b) { return _mm512_mask_mov_ps(b, which, a); }
inline Integers select(Mask which, Integers a, Integers b) {
    return (Integers)_mm512_mask_mov_epi32((__m512i)b, which, (__m512i)a);
}

inline Floats as_floats(Integers bits) { return (Floats)bits; }
inline Integers as_bits(Floats a) { return (Integers)a; }
inline Floats to_floats(Integers a) { return _mm512_cvtepi32_ps((__m512i)a); }  // of integers with a sign
inline Integers to_integers(Floats a) { return (Integers)_mm512_cvtps_epi32(a); }
inline void store_bytes(int8_t* to, Integers a, Mask which) {
    _mm_mask_storeu_epi8(to, which, _mm512_cvtsepi32_epi8((__m512i)a));
}

// Numbers of 16 bits: as integers, and the float32 numbers that such of float16 are.
inline Integers load_halves(const uint16_t* from) {
    return (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
inline Integers load_halves(const uint16_t* from, Mask which) {
    return (Integers)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from));
}
inline void store_halves(uint16_t* to, Integers a) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)a));
}
inline void store_halves(uint16_t* to, Integers a, Mask which) {
    _mm256_mask_storeu_epi16(to, which, _mm512_cvtepi32_epi16((__m512i)a));
}
inline Floats load_float16(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

// Each 32 bits of sum, plus the products of the four bytes of w, which have no sign, with those of x, which have one.
inline Integers add_products(Integers sum, Integers w, Integers x) {
#ifdef __AVX512VNNI__
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else  // those of the even bytes, and of the odd ones, in 16 bits
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8);
    const __m512i odd = _mm512_srai_epi16((__m512i)x, 8);
    sum += (Integers)_mm512_madd_epi16(_mm512_and_si512((__m512i)w, _mm512_set1_epi16(0xff)), even);
    return sum + (Integers)_mm512_madd_epi16(_mm512_srli_epi16((__m512i)w, 8), odd);
#endif
}

// 16 rows of 16 numbers -> their columns, `to` 16 apart
inline void transpose(Floats (&rows)[WIDTH], float* to) {
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

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr bool IS_WIDE = false;

template <class Half>
struct Two {
    Half low, high;

    Two operator+(Two other) const { return {low + other.low, high + other.high}; }
    Two operator-(Two other) const { return {low - other.low, high - other.high}; }
    Two operator*(Two other) const { return {low * other.low, high * other.high}; }
    Two operator/(Two other) const { return {low / other.low, high / other.high}; }
    Two operator&(Two other) const { return {low & other.low, high & other.high}; }
    Two operator|(Two other) const { return {low | other.low, high | other.high}; }
    Two operator^(Two other) const { return {low ^ other.low, high ^ other.high}; }
    Two operator>>(int bits) const { return {low >> bits, high >> bits}; }
    Two operator<<(int bits) const { return {low << bits, high << bits}; }
};

typedef uint32_t Integers8 __attribute__((vector_size(32)));
typedef int32_t Mask8 __attribute__((vector_size(32)));
using Floats = Two<__m256>;
using Integers = Two<Integers8>;
using Mask = Two<Mask8>;

inline Floats set(float number) { return {_mm256_set1_ps(number), _mm256_set1_ps(number)}; }
inline Integers set_integer(uint32_t number) {
    return {(Integers8)_mm256_set1_epi32(number), (Integers8)_mm256_set1_epi32(number)};
}
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats a) { _mm256_storeu_ps(to, a.low), _mm256_storeu_ps(to + 8, a.high); }
inline Integers load_integers(const void* from) {
    const __m256i* const both = (const __m256i*)from;
    return {(Integers8)_mm256_loadu_si256(both), (Integers8)_mm256_loadu_si256(both + 1)};
}

inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats as_floats(Integers bits) { return {(__m256)bits.low, (__m256)bits.high}; }
inline Integers as_bits(Floats a) { return {(Integers8)a.low, (Integers8)a.high}; }
inline Floats abs(Floats a) { return as_floats(as_bits(a) & set_integer(0x7fffffff)); }
inline Floats round(Floats a) {
    return {_mm256_round_ps(a.low, _MM_FROUND_TO_NEAREST_INT), _mm256_round_ps(a.high, _MM_FROUND_TO_NEAREST_INT)};
}
inline Floats to_floats(Integers a) {
    return {_mm256_cvtepi32_ps((__m256i)a.low), _mm256_cvtepi32_ps((__m256i)a.high)};
}
inline Integers to_integers(Floats a) {
    return {(Integers8)_mm256_cvtps_epi32(a.low), (Integers8)_mm256_cvtps_epi32(a.high)};
}
inline Floats times_power_of_two(Floats a, Floats n) {  // |n| < 200, in two steps, since 2^n alone may be out of range
    const Integers whole = to_integers(n), more = to_integers(round(n * set(0.5f))), bias = set_integer(127);
    return a * as_floats((more + bias) << 23) * as_floats((whole - more + bias) << 23);
}

template <class Reduce>
inline auto reduce(Reduce of_two, __m256 a) {  // in the order of AVX-512's reductions
    const __m128 four = of_two(_mm256_extractf128_ps(a, 1), _mm256_castps256_ps128(a));
    const __m128 two = of_two(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(of_two(two, _mm_movehdup_ps(two)));
}
inline float sum_of(Floats a) { return reduce([](__m128 x, __m128 y) { return x + y; }, a.high + a.low); }
inline float most_of(Floats a) {
    return reduce([](__m128 x, __m128 y) { return _mm_max_ps(x, y); }, _mm256_max_ps(a.high, a.low));
}
inline float least_of(Floats a) {
    return reduce([](__m128 x, __m128 y) { return _mm_min_ps(x, y); }, _mm256_min_ps(a.high, a.low));
}
inline uint32_t least_of(Integers a) {
    uint32_t all[WIDTH];
    std::memcpy(all, &a, sizeof all);
    return *std::min_element(all, all + WIDTH);
}

inline Mask first_of(long count) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int low = std::clamp(count, 0L, 16L);
    return {(Mask8)_mm256_cmpgt_epi32(_mm256_set1_epi32(low), index),
            (Mask8)_mm256_cmpgt_epi32(_mm256_set1_epi32(low - 8), index)};
}
template <int how>
inline Mask compare(Floats a, Floats b) {
    return {(Mask8)_mm256_cmp_ps(a.low, b.low, how), (Mask8)_mm256_cmp_ps(a.high, b.high, how)};
}
inline Mask is_more(Floats a, Floats b) { return compare<_CMP_GT_OQ>(a, b); }
inline Mask is_at_least(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask is_equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask is_nan(Floats a) { return compare<_CMP_UNORD_Q>(a, a); }
inline int bits_of(Mask which) {
    return _mm256_movemask_ps((__m256)which.low) | _mm256_movemask_ps((__m256)which.high) << 8;
}
inline int count_of(Mask which) { return _mm_popcnt_u32(bits_of(which)); }
inline Floats select(Mask which, Floats a, Floats b) {
    return {_mm256_blendv_ps(b.low, a.low, (__m256)which.low), _mm256_blendv_ps(b.high, a.high, (__m256)which.high)};
}
inline Integers select(Mask which, Integers a, Integers b) {
    return as_bits(select(which, as_floats(a), as_floats(b)));
}

inline Floats load(const float* from, Mask which) {
    return {_mm256_maskload_ps(from, (__m256i)which.low), _mm256_maskload_ps(from + 8, (__m256i)which.high)};
}
inline void store(float* to, Floats a, Mask which) {
    if (bits_of(which) == 0xffff) return store(to, a);
    _mm256_maskstore_ps(to, (__m256i)which.low, a.low);
    _mm256_maskstore_ps(to + 8, (__m256i)which.high, a.high);
}
// Of numbers of 16 and 8 bits there are no masked ones: `which` are always the first.
inline Integers load_halves(const uint16_t* from) {
    const __m128i* const both = (const __m128i*)from;
    return {(Integers8)_mm256_cvtepu16_epi32(_mm_loadu_si128(both)),
            (Integers8)_mm256_cvtepu16_epi32(_mm_loadu_si128(both + 1))};
}
inline Integers load_halves(const uint16_t* from, Mask which) {
    if (bits_of(which) == 0xffff) return load_halves(from);
    uint16_t all[WIDTH] = {};
    std::memcpy(all, from, count_of(which) * sizeof *from);
    return load_halves(all);
}
inline void store_halves(uint16_t* to, Integers a) {
    const __m256i turned = _mm256_packus_epi32((__m256i)a.low, (__m256i)a.high);
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(turned, 0xd8));
}
inline void store_halves(uint16_t* to, Integers a, Mask which) {
    if (bits_of(which) == 0xffff) return store_halves(to, a);
    uint16_t all[WIDTH];
    store_halves(all, a);
    std::memcpy(to, all, count_of(which) * sizeof *to);
}
inline void store_bytes(int8_t* to, Integers a, Mask which) {
    const __m256i turned = _mm256_packs_epi32((__m256i)a.low, (__m256i)a.high);
    const __m256i halves = _mm256_permute4x64_epi64(turned, 0xd8);
    const __m128i all = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    std::memcpy(to, &all, count_of(which));
}
inline Floats load_float16(const uint16_t* from) {
    const __m128i* const both = (const __m128i*)from;
    return {_mm256_cvtph_ps(_mm_loadu_si128(both)), _mm256_cvtph_ps(_mm_loadu_si128(both + 1))};
}

inline Integers8 add_products(Integers8 sum, Integers8 w, Integers8 x) {
#ifdef __AVXVNNI__
    return (Integers8)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
    const __m256i odd = _mm256_srai_epi16((__m256i)x, 8);
    sum += (Integers8)_mm256_madd_epi16(_mm256_and_si256((__m256i)w, _mm256_set1_epi16(0xff)), even);
    return sum + (Integers8)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)w, 8), odd);
#endif
}
inline Integers add_products(Integers sum, Integers w, Integers x) {
    return {add_products(sum.low, w.low, x.low), add_products(sum.high, w.high, x.high)};
}

// 16 rows of 16 numbers -> their columns, `to` 16 apart: four squares of 8 by 8
inline void transpose(Floats (&rows)[WIDTH], float* to) {
    for (int of_rows = 0; of_rows < WIDTH; of_rows += 8)
        for (int half = 0; half < 2; half++) {
            __m256 square[8], other[8];
            for (int i = 0; i < 8; i++) square[i] = half ? rows[of_rows + i].high : rows[of_rows + i].low;
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
                float* const column = to + (half * 8 + i) * WIDTH + of_rows;
                _mm256_storeu_ps(column, _mm256_permute2f128_ps(square[i], square[i + 4], 0x20));
                _mm256_storeu_ps(column + 4 * WIDTH, _mm256_permute2f128_ps(square[i], square[i + 4], 0x31));
            }
        }
}

#else
#error "the CPU has neither AVX-512 nor AVX2 with FMA"
#endif

inline Integers lanes() {
    static constexpr uint32_t ALL[WIDTH] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_integers(ALL);
}

// bfloat16 is the upper half of float32.
inline Floats load(const BFloat16* from) { return as_floats(load_halves(from) << 16); }
inline Floats load(const BFloat16* from, Mask which) { return as_floats(load_halves(from, which) << 16); }

#ifdef __AVX512BF16__
inline void store(BFloat16* to, Floats a) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(a)); }
inline void store(BFloat16* to, Floats a, Mask which) {
    _mm256_mask_storeu_epi16(to, which, (__m256i)_mm512_cvtneps_pbh(a));
}
#else
// To the nearest, and to the even one of two that are as near. NaN stays, as its lower half is 0: it is the processor's
// own, or was widened.
inline Integers to_bfloat16(Floats a) {
    const Integers bits = as_bits(a), is_odd = bits >> 16 & set_integer(1);
    return (bits + is_odd + set_integer(0x7fff)) >> 16;
}

inline void store(BFloat16* to, Floats a) { store_halves(to, to_bfloat16(a)); }
inline void store(BFloat16* to, Floats a, Mask which) { store_halves(to, to_bfloat16(a), which); }
#endif
