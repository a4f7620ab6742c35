// Draws a token of each row of logits: temperature, then top-k, top-p and min-p, then the largest of z + g, where z are
// the logits that are left and g is Gumbel noise of their own. So a token falls with its probability (Gumbel-max), and
// the noise of one that cannot win is never made: it is a function of the token and of a key.

#include <cmath>
#include <functional>
#include <vector>

#include "kernel.h"

namespace {

constexpr float MOST_NOISE = 16.7f;    // -ln(-ln u) of the largest u
constexpr float NONE = -INFINITY;
constexpr int NUM_LIMITS = 5;
constexpr float LIMITS[NUM_LIMITS] = {-2.0f, -4.0f, -8.0f, -16.0f, NONE};  // below the largest logit

// ln x of a positive number, to the last bit or two (the polynomial is that of Cephes).
__m512 logarithm(__m512 x) {
    __m512 exponent = _mm512_getexp_ps(x), mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    const __mmask16 is_large = _mm512_cmp_ps_mask(mantissa, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
    mantissa = _mm512_mask_mul_ps(mantissa, is_large, mantissa, _mm512_set1_ps(0.5f));
    exponent = _mm512_mask_add_ps(exponent, is_large, exponent, _mm512_set1_ps(1.0f));
    const __m512 r = _mm512_sub_ps(mantissa, _mm512_set1_ps(1.0f)), square = _mm512_mul_ps(r, r);
    __m512 sum = _mm512_set1_ps(7.0376836292e-2f);
    for (const float factor : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                               -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(factor));
    sum = _mm512_fmadd_ps(_mm512_mul_ps(sum, r), square, _mm512_mul_ps(square, _mm512_set1_ps(-0.5f)));
    return _mm512_fmadd_ps(exponent, _mm512_set1_ps(0.693147181f), _mm512_add_ps(r, sum));
}

// Random words of some tokens: the finalizer of MurmurHash3 (Appleby), twice, each time after another half of the key.
// As `uniforms` of model/sampling.py has them.
__m512i words_of(__m512i tokens, uint64_t key) {
    for (const uint32_t half : {(uint32_t)key, (uint32_t)(key >> 32)}) {
        tokens = _mm512_add_epi32(tokens, _mm512_set1_epi32(half));
        tokens = _mm512_xor_si512(tokens, _mm512_srli_epi32(tokens, 16));
        tokens = _mm512_mullo_epi32(tokens, _mm512_set1_epi32(0x85ebca6b));
        tokens = _mm512_xor_si512(tokens, _mm512_srli_epi32(tokens, 13));
        tokens = _mm512_mullo_epi32(tokens, _mm512_set1_epi32(0xc2b2ae35));
        tokens = _mm512_xor_si512(tokens, _mm512_srli_epi32(tokens, 16));
    }
    return tokens;
}

// -ln(-ln u) for u = (the word's upper 23 bits + 1/2) / 2^23, which is neither 0 nor 1
__m512 gumbel(__m512i word) {
    const __m512 bits = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(word, 9)), _mm512_set1_ps(0.5f));
    const __m512 exponential = logarithm(_mm512_mul_ps(bits, _mm512_set1_ps(0x1p-23f)));
    return _mm512_sub_ps(_mm512_setzero_ps(), logarithm(_mm512_sub_ps(_mm512_setzero_ps(), exponential)));
}

// What a request asks for; as doubles, in this order.
struct Cut {
    double temperature, top_k, top_p, min_p;

    bool is_none() const { return top_k == 0 && top_p >= 1 && min_p <= 0; }

    // The least z that is left, of `size` numbers up to 0, filled up with -inf to whole vectors.
    float least(const float* z, long size, std::vector<float>& largest) const {
        __m512 sums[NUM_LIMITS];
        long counts[NUM_LIMITS] = {};
        for (__m512& sum : sums) sum = _mm512_setzero_ps();
        for (long i = 0; i < size; i += WIDTH) {
            const __m512 value = load(z + i), mass = exponential(value);
            for (int limit = 0; limit < NUM_LIMITS; limit++) {
                const __mmask16 is_in = _mm512_cmp_ps_mask(value, _mm512_set1_ps(LIMITS[limit]), _CMP_GE_OQ);
                counts[limit] += _mm_popcnt_u32(is_in);
                sums[limit] = _mm512_mask_add_ps(sums[limit], is_in, sums[limit], mass);
            }
        }
        const double total = _mm512_reduce_add_ps(sums[NUM_LIMITS - 1]);
        int limit = 0;
        for (; limit < NUM_LIMITS - 1; limit++)
            if (reaches(counts[limit], _mm512_reduce_add_ps(sums[limit]) / total, LIMITS[limit])) break;
        largest.resize(counts[limit] + WIDTH);
        long count = 0;
        for (long i = 0; i < size; i += WIDTH) {
            const __m512 value = load(z + i);
            const __mmask16 is_in = _mm512_cmp_ps_mask(value, _mm512_set1_ps(LIMITS[limit]), _CMP_GE_OQ);
            _mm512_mask_compressstoreu_ps(largest.data() + count, is_in, value);
            count += _mm_popcnt_u32(is_in);
        }
        const auto begin = largest.begin();
        if (top_k > 0 && top_k < count) {
            count = (long)top_k;
            std::nth_element(begin, begin + count - 1, largest.begin() + counts[limit], std::greater<float>());
        }
        std::sort(begin, begin + count, std::greater<float>());
        double all = top_k > 0 ? 0 : total, before = 0;  // top-p counts the mass of what top-k leaves
        for (long i = 0; top_k > 0 && i < count; i++) all += std::exp((double)largest[i]);
        float least = largest[0];
        for (long i = 0; i < count; i++) {
            const double mass = std::exp((double)largest[i]);
            if (i > 0 && (before / all >= top_p || mass < min_p)) break;
            least = largest[i];
            before += mass;
        }
        return least;
    }

    // Whether so many numbers, of so much of the mass, hold all that is left, and all that top-p counts.
    bool reaches(long count, double mass, float limit) const {
        if (top_k > 0) return count >= top_k;
        return (top_p < 1 && mass >= top_p) || std::exp(limit) <= min_p;
    }
};

// Of logits (size) whose largest is a number: the token that is drawn.
template <class Number>
int64_t draw(const Number* logits, long size, const Cut& cut, uint64_t key) {
    static thread_local std::vector<float> scaled, largest;
    const long whole = (size + WIDTH - 1) / WIDTH * WIDTH;
    scaled.resize(whole);
    float* const z = scaled.data();
    __m512 top = _mm512_set1_ps(NONE);
    for (long i = 0; i < size; i += WIDTH)
        top = _mm512_mask_max_ps(top, first_of(size - i), top, load(logits + i, first_of(size - i)));
    const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    const __m512 factor = _mm512_set1_ps((float)cut.temperature);
    for (long i = 0; i < whole; i += WIDTH) {
        const __m512 below = _mm512_sub_ps(load(logits + i, first_of(size - i)), shift);
        store(z + i, _mm512_mask_div_ps(_mm512_set1_ps(NONE), first_of(size - i), below, factor));
    }
    const __m512 least = _mm512_set1_ps(cut.is_none() ? NONE : cut.least(z, whole, largest));
    __m512 most = _mm512_set1_ps(NONE);
    __m512i winners = _mm512_setzero_si512();
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (long i = 0; i < whole; i += WIDTH) {
        const __m512 value = load(z + i), at_most = _mm512_add_ps(value, _mm512_set1_ps(MOST_NOISE));
        const __mmask16 is_left = _mm512_cmp_ps_mask(value, least, _CMP_GE_OQ);
        const __mmask16 can_win = _mm512_mask_cmp_ps_mask(is_left, at_most, most, _CMP_GT_OQ);
        if (!can_win) continue;
        const __m512i tokens = _mm512_add_epi32(_mm512_set1_epi32(i), lanes);
        const __m512 score = _mm512_add_ps(value, gumbel(words_of(tokens, key)));
        const __mmask16 is_more = _mm512_mask_cmp_ps_mask(can_win, score, most, _CMP_GT_OQ);
        most = _mm512_mask_mov_ps(most, is_more, score);
        winners = _mm512_mask_mov_epi32(winners, is_more, tokens);
    }
    const __mmask16 equal = _mm512_cmp_ps_mask(most, _mm512_set1_ps(_mm512_reduce_max_ps(most)), _CMP_EQ_OQ);
    return _mm512_mask_reduce_min_epi32(equal, winners);
}

// Logits (N, size), of which R rows (R) are drawn from, what each asks for (R, 4), and its key (R) -> tokens (R)
template <class Number>
void draw_rows(Arguments given, long part, long num_parts) {
    const long count = given.size(5), size = given.size(6);
    for (long row = count * part / num_parts; row < count * (part + 1) / num_parts; row++) {
        const double* const asked = given.array<double>(2) + 4 * row;
        const Number* const logits = given.array<Number>(0) + given.array<int64_t>(1)[row] * size;
        given.array<int64_t>(4)[row] =
            draw(logits, size, Cut{asked[0], asked[1], asked[2], asked[3]}, given.array<uint64_t>(3)[row]);
    }
}

}  // namespace

KERNEL(draw_float32) { draw_rows<float>(given, part, num_parts); }
#ifdef __AVX512BF16__
KERNEL(draw_bfloat16) { draw_rows<BFloat16>(given, part, num_parts); }
#endif
