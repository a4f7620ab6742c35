// Draws a token of each row of logits: temperature, then top-k, top-p and min-p, then the largest of z + g, where z are
// the logits that are left and g is Gumbel noise of their own. So a token falls with its probability (Gumbel-max), and
// the noise of one that cannot win is never made: it is a function of the token and of a key.

#include <cmath>
#include <vector>

#include "kernel.h"

namespace {

constexpr float MOST_NOISE = 16.7f;  // -ln(-ln u) of the largest u
constexpr float NONE = -INFINITY;

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

    // The least z that is left, of `size` numbers up to 0, filled up with -inf to whole vectors. As equal numbers stay or
    // go together, it follows from how many are larger, and from their mass.
    float least(const float* z, long size) const {
        const float by_min_p = min_p > 0 ? std::log(min_p) : NONE;
        if (top_k == 0 && top_p >= 1) return by_min_p;
        static thread_local std::vector<float> masses;
        masses.resize(size);
        for (long i = 0; i < size; i += WIDTH) store(masses.data() + i, exponential(load(z + i)));
        const auto above = [&](float limit) { return Above(z, masses.data(), size, limit); };
        double all = above(NONE).mass;
        float by_top_k = NONE, by_top_p = NONE;
        if (top_k > 0) {
            by_top_k = least_that([&](float value) { return above(value).count < top_k; });
            const Above larger = above(by_top_k);  // those that are equal count as far as there is room for them
            if (by_top_k > NONE) all = larger.mass + (top_k - larger.count) * std::exp((double)by_top_k);
        }
        if (top_p < 1) by_top_p = least_that([&](float value) { return above(value).mass < top_p * all; });
        return std::max({by_min_p, by_top_k, by_top_p});
    }

    // How many numbers are above a limit, and their mass.
    struct Above {
        long count = 0;
        double mass;

        Above(const float* z, const float* masses, long size, float limit) {
            __m512 sum = _mm512_setzero_ps();
            for (long i = 0; i < size; i += WIDTH) {
                const __mmask16 is_above = _mm512_cmp_ps_mask(load(z + i), _mm512_set1_ps(limit), _CMP_GT_OQ);
                count += _mm_popcnt_u32(is_above);
                sum = _mm512_mask_add_ps(sum, is_above, sum, load(masses + i));
            }
            mass = _mm512_reduce_add_ps(sum);
        }
    };

    // The least number up to 0 that is left, where 0 is and with each all that are larger: by halves of all floats.
    template <class IsLeft>
    static float least_that(IsLeft is_left) {
        uint32_t left = 0, gone = 0x7f800001;  // 0, and beyond infinity: the bits of a float grow with its size
        while (gone - left > 1) {
            const uint32_t middle = left + (gone - left) / 2;
            (is_left(negative(middle)) ? left : gone) = middle;
        }
        return negative(left);
    }

    static float negative(uint32_t bits) {
        float size;
        std::memcpy(&size, &bits, sizeof size);
        return -size;
    }
};

// Of logits (size) whose largest is a number: the token that is drawn.
template <class Number>
int64_t draw(const Number* logits, long size, const Cut& cut, uint64_t key) {
    static thread_local std::vector<float> scaled;
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
    const __m512 least = _mm512_set1_ps(cut.least(z, whole));
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
