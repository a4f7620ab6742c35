// Attention of streams, one new token each, over the keys and values that lie in blocks of a paged cache.
//
// q and z (N, H, D) of N streams; keys and values (slots, Hkv, D) of one layer; blocks (N, max_blocks), the blocks of each
// stream in order, `size` slots each; stream n sees its keys from first[n] up to before end[n]. Each key and value is read
// once, for all heads of its group. Scores, softmax and sums are float32; nothing depends on the other streams.

#ifndef __AVX512F__
#error "the CPU has no AVX-512"
#endif

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int WIDTH = 16;  // numbers in a vector

__m512 load(const float* from) { return _mm512_loadu_ps(from); }
void store(float* to, __m512 values) { _mm512_storeu_ps(to, values); }

#ifdef __AVX512BF16__
__m512 load(const uint16_t* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
void store(uint16_t* to, __m512 values) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(values)); }
#endif

// e^x for x <= 0, to the last bit or two: 2^n e^r with |r| <= ln 2 / 2, and e^r by its series up to r^7 / 7!. NaN stays.
__m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // below, it is 0
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);  // ln 2 in two parts
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(sum, n);
}

// scores (padded to whole vectors with -inf) -> e^(score - max) in place; the sum of them.
float exponentials(float* scores, long count) {
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (long i = 0; i < count; i += WIDTH) largest = _mm512_max_ps(largest, load(scores + i));
    const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < count; i += WIDTH) {
        const __m512 value = exponential(_mm512_sub_ps(load(scores + i), shift));
        store(scores + i, value);
        sum = _mm512_add_ps(sum, value);
    }
    return _mm512_reduce_add_ps(sum);
}

// The layer's keys or values of one stream, from the key `first` up to before `end`.
template <class Number>
struct Rows {
    const Number* pool;
    const int64_t* blocks;
    long size, first, end, stride;

    template <class Visit>
    void visit(Visit each) const {
        for (long key = first, index = 0; key < end;) {
            const Number* row = pool + (blocks[key / size] * size + key % size) * stride;
            for (const long next = std::min(end, (key / size + 1) * size); key < next; key++, row += stride)
                each(index++, row);
        }
    }
};

// One stream and the `group` query heads that share one head of keys and values; q and z are those of the first.
template <class Number>
void attend(const Number* q, const Rows<Number>& keys, const Rows<Number>& values, Number* z, long group, long D,
            float scale, std::vector<float>& memory) {
    const long padded = (keys.end - keys.first + WIDTH - 1) / WIDTH * WIDTH;
    memory.assign(group * padded, -std::numeric_limits<float>::infinity());
    memory.resize(group * (padded + D), 0.0f);
    float *const scores = memory.data(), *const sums = scores + group * padded;

    keys.visit([&](long index, const Number* k) {
        for (long head = 0; head < group; head++) {
            __m512 products = _mm512_setzero_ps();
            for (long d = 0; d < D; d += WIDTH)
                products = _mm512_fmadd_ps(load(q + head * D + d), load(k + d), products);
            scores[head * padded + index] = scale * _mm512_reduce_add_ps(products);
        }
    });
    for (long head = 0; head < group; head++) {
        const float total = exponentials(scores + head * padded, padded);
        for (long i = 0; i < padded; i += WIDTH)
            store(scores + head * padded + i, _mm512_div_ps(load(scores + head * padded + i), _mm512_set1_ps(total)));
    }
    values.visit([&](long index, const Number* v) {
        for (long head = 0; head < group; head++) {
            const __m512 weight = _mm512_set1_ps(scores[head * padded + index]);
            for (long d = 0; d < D; d += WIDTH)
                store(sums + head * D + d, _mm512_fmadd_ps(weight, load(v + d), load(sums + head * D + d)));
        }
    });
    for (long i = 0; i < group * D; i += WIDTH) store(z + i, load(sums + i));
}

template <class Number>
void attend_all(const Number* q, const Number* keys, const Number* values, Number* z, const int64_t* blocks,
                const int64_t* first, const int64_t* end, long N, long max_blocks, long size, long H, long Hkv, long D,
                float scale) {
    const long group = H / Hkv;
#pragma omp parallel
    {
        std::vector<float> memory;
#pragma omp for schedule(dynamic)
        for (long item = 0; item < N * Hkv; item++) {
            const long n = item / Hkv, head = item % Hkv, from = (n * H + head * group) * D;
            const int64_t* const own = blocks + n * max_blocks;
            attend<Number>(q + from, {keys + head * D, own, size, first[n], end[n], Hkv * D},
                           {values + head * D, own, size, first[n], end[n], Hkv * D}, z + from, group, D, scale, memory);
        }
    }
}

}  // namespace

extern "C" void paged_attention_float32(const float* q, const float* keys, const float* values, float* z,
                                        const int64_t* blocks, const int64_t* first, const int64_t* end, long N,
                                        long max_blocks, long size, long H, long Hkv, long D, float scale) {
    attend_all(q, keys, values, z, blocks, first, end, N, max_blocks, size, H, Hkv, D, scale);
}

#ifdef __AVX512BF16__
extern "C" void paged_attention_bfloat16(const uint16_t* q, const uint16_t* keys, const uint16_t* values, uint16_t* z,
                                         const int64_t* blocks, const int64_t* first, const int64_t* end, long N,
                                         long max_blocks, long size, long H, long Hkv, long D, float scale) {
    attend_all(q, keys, values, z, blocks, first, end, N, max_blocks, size, H, Hkv, D, scale);
}
#endif
