// Draws a token of each row of logits: temperature, then top-k, top-p and min-p, then the largest of z + g, where z are
// the logits that are left and g is Gumbel noise of their own. So a token falls with its probability (Gumbel-max), and
// the noise of one that cannot win is never made: it is a function of the token and of a key.

#include <cmath>
#include <vector>

#include "kernel.h"

namespace {

constexpr float MOST_NOISE = 16.7f;  // -ln(-ln u) of the largest u
constexpr float NONE = -INFINITY;

// ln x of a normal positive number, to the last bit or two (the polynomial is that of Cephes).
Floats logarithm(Floats x) {
    constexpr uint32_t ONE = 0x3f800000, LEAST = 0x3f3504f3;  // the bits of 1, and of the least mantissa, sqrt(1/2)
    const Integers bits = as_bits(x) + set_integer(ONE - LEAST);
    const Floats exponent = to_floats(bits >> 23) - set(127.0f);
    const Floats mantissa = as_floats((bits & set_integer(0x7fffff)) + set_integer(LEAST));
    const Floats r = mantissa - set(1.0f), square = r * r;
    Floats sum = set(7.0376836292e-2f);
    for (const float factor : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                               -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        sum = fma(sum, r, set(factor));
    sum = fma(sum * r, square, square * set(-0.5f));
    return fma(exponent, set(0.693147181f), r + sum);
}

// Random words of some tokens: the finalizer of MurmurHash3 (Appleby), twice, each time after another half of the key.
// As `uniforms` of model/sampling.py has them.
Integers words_of(Integers tokens, uint64_t key) {
    for (const uint32_t half : {(uint32_t)key, (uint32_t)(key >> 32)}) {
        tokens = tokens + set_integer(half);
        tokens = tokens ^ (tokens >> 16);
        tokens = tokens * set_integer(0x85ebca6b);
        tokens = tokens ^ (tokens >> 13);
        tokens = tokens * set_integer(0xc2b2ae35);
        tokens = tokens ^ (tokens >> 16);
    }
    return tokens;
}

// -ln(-ln u) for u = (the word's upper 23 bits + 1/2) / 2^23, which is neither 0 nor 1
Floats gumbel(Integers word) {
    const Floats bits = to_floats(word >> 9) + set(0.5f);
    const Floats exponential = logarithm(bits * set(0x1p-23f));
    return Floats{} - logarithm(Floats{} - exponential);
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
            Floats sum = Floats{};
            for (long i = 0; i < size; i += WIDTH) {
                const Mask is_above = is_more(load(z + i), set(limit));
                count += count_of(is_above);
                sum = sum + select(is_above, load(masses + i), Floats{});
            }
            mass = sum_of(sum);
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
    Floats top = set(NONE);
    for (long i = 0; i < size; i += WIDTH)
        top = max(top, select(first_of(size - i), load(logits + i, first_of(size - i)), set(NONE)));
    const Floats shift = set(most_of(top));
    const Floats factor = set((float)cut.temperature);
    for (long i = 0; i < whole; i += WIDTH) {
        const Floats below = load(logits + i, first_of(size - i)) - shift;
        store(z + i, select(first_of(size - i), below / factor, set(NONE)));
    }
    const Floats least = set(cut.least(z, whole));
    Floats most = set(NONE);
    Integers winners = Integers{};
    for (long i = 0; i < whole; i += WIDTH) {
        const Floats value = load(z + i), at_most = value + set(MOST_NOISE);
        const Mask can_win = is_at_least(value, least) & is_more(at_most, most);
        if (count_of(can_win) == 0) continue;
        const Integers tokens = set_integer(i) + lanes();
        const Floats score = value + gumbel(words_of(tokens, key));
        const Mask wins = is_more(score, most) & can_win;
        most = select(wins, score, most);
        winners = select(wins, tokens, winners);
    }
    return least_of(select(is_equal(most, set(most_of(most))), winners, set_integer(size)));
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
KERNEL(draw_bfloat16) { draw_rows<BFloat16>(given, part, num_parts); }
