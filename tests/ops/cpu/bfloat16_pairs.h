// Emulates AVX512-BF16 on a CPU that has AVX-512 alone, so that the kernels' code for it is tested there too.

#include <immintrin.h>

// _mm512_dpbf16_ps: adds the products of the odd numbers of each pair, then those of the even numbers.
static inline __m512 multiply_pairs(__m512 sum, __m512bh a, __m512bh b) {
    const __m512i first = (__m512i)a, second = (__m512i)b, upper = _mm512_set1_epi32(0xffff0000);
    const __m512 odd = (__m512)_mm512_and_si512(first, upper), even = (__m512)_mm512_slli_epi32(first, 16);
    sum = _mm512_fmadd_ps(odd, (__m512)_mm512_and_si512(second, upper), sum);
    return _mm512_fmadd_ps(even, (__m512)_mm512_slli_epi32(second, 16), sum);
}

// _mm512_cvtneps_pbh: rounds float32 to bfloat16, to nearest, ties to even.
static inline __m256bh to_bfloat16_vector(__m512 numbers) {
    const __m512i bits = (__m512i)numbers, is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
    return (__m256bh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

#define _mm512_dpbf16_ps multiply_pairs
#define _mm512_cvtneps_pbh to_bfloat16_vector
#define __AVX512BF16__ 1
