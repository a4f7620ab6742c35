// Emulates AVX-VNNI on a CPU that has AVX512-VNNI instead, so that the kernels' code for it is tested there too.
//
// The instruction is the same except for its encoding. The compiler may use no other instructions of AVX-512.

#include <immintrin.h>

static inline __m256i multiply_bytes_with_avx512(__m256i sum, __m256i w, __m256i x) {
    asm("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}

#define _mm256_dpbusd_avx_epi32 multiply_bytes_with_avx512
#define __AVXVNNI__ 1
