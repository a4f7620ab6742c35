// Draws a token from each of some rows of logits: temperature, then top-k, top-p and min-p, then the Gumbel-max trick.
//
// z are the logits minus their maximum, divided by the temperature. The token with the largest z + g is drawn, where g
// is the token's own Gumbel noise, so each token is drawn with its probability. The noise is a function of the token
// and of a 64-bit key, so it need not be computed for a token that cannot win.
//
// Logits (N, V). A task has some of the draws. A draw depends on its own row and key alone.

#include <cmath>
#include <vector>

#include "kernel.h"

namespace {

constexpr float MAX_NOISE = 16.7f;  // above the largest noise, -ln(-ln u) of the largest u
constexpr float MINUS_INFINITY = -INFINITY;

// ln x of a normal positive number, accurate except for the last bit or two (the polynomial is that of Cephes).
Floats log(Floats x) {
    constexpr uint32_t ONE = 0x3f800000, MIN_MANTISSA = 0x3f3504f3;  // the bits of 1 and of sqrt(1/2)
    const Integers bits = as_bits(x) + broadcast_integer(ONE - MIN_MANTISSA);
    const Floats exponent = to_floats(bits >> 23) - broadcast(127.0f);
    const Floats mantissa = as_floats((bits & broadcast_integer(0x7fffff)) + broadcast_integer(MIN_MANTISSA));
    const Floats r = mantissa - broadcast(1.0f), square = r * r;
    Floats sum = broadcast(7.0376836292e-2f);
    for (const float coefficient : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                    -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        sum = fma(sum, r, broadcast(coefficient));
    sum = fma(sum * r, square, square * broadcast(-0.5f));
    return fma(exponent, broadcast(0.693147181f), r + sum);
}

// A random word for each token: the finalizer of MurmurHash3 (Appleby), twice, each time after adding another half of
// the key. `uniforms` in model/ops/torch_sampling.py computes the same words.
Integers random_words(Integers tokens, uint64_t key) {
    for (const uint32_t half : {(uint32_t)key, (uint32_t)(key >> 32)}) {
        tokens = tokens + broadcast_integer(half);
        tokens = tokens ^ (tokens >> 16);
        tokens = tokens * broadcast_integer(0x85ebca6b);
        tokens = tokens ^ (tokens >> 13);
        tokens = tokens * broadcast_integer(0xc2b2ae35);
        tokens = tokens ^ (tokens >> 16);
    }
    return tokens;
}

// -ln(-ln u) for u = (the word's upper 23 bits + 1/2) / 2^23, which is neither 0 nor 1
Floats gumbel(Integers word) {
    const Floats bits = to_floats(word >> 9) + broadcast(0.5f);
    const Floats log_uniform = log(bits * broadcast(0x1p-23f));
    return Floats{} - log(Floats{} - log_uniform);
}

// The parameters of one draw.
STRUCT(DrawParameters, (double, temperature), (double, top_k), (double, top_p), (double, min_p));

struct Params : DrawParameters {
    // The smallest z that top-k, top-p and min-p keep. z is at most 0, and padded with -inf to `size`, a multiple of
    // 16. Equal values are kept or removed together, so the threshold follows from how many values are larger, and from
    // their mass.
    float threshold(const float* z, long size) const {
        const float by_min_p = min_p > 0 ? std::log(min_p) : MINUS_INFINITY;
        if (top_k == 0 && top_p >= 1) return by_min_p;
        static thread_local std::vector<float> masses;  // e^z
        masses.resize(size);
        for (long i = 0; i < size; i += WIDTH) store(masses.data() + i, exp(load(z + i)));
        const auto above = [&](float limit) { return Above(z, masses.data(), size, limit); };
        double total = above(MINUS_INFINITY).mass;
        float by_top_k = MINUS_INFINITY, by_top_p = MINUS_INFINITY;
        if (top_k > 0) {
            by_top_k = min_kept([&](float value) { return above(value).count < top_k; });
            const Above larger = above(by_top_k);  // values equal to the threshold fill the rest of the k places
            if (by_top_k > MINUS_INFINITY)
                total = larger.mass + (top_k - larger.count) * std::exp((double)by_top_k);
        }
        if (top_p < 1) by_top_p = min_kept([&](float value) { return above(value).mass < top_p * total; });
        return std::max({by_min_p, by_top_k, by_top_p});
    }

    // How many values are above a limit, and their mass: the sum of their e^z.
    struct Above {
        long count = 0;
        double mass;

        Above(const float* z, const float* masses, long size, float limit) {
            Floats sum = Floats{};
            for (long i = 0; i < size; i += WIDTH) {
                const Mask is_above = is_greater(load(z + i), broadcast(limit));
                count += count_lanes(is_above);
                sum = sum + select(is_above, load(masses + i), Floats{});
            }
            mass = reduce_add(sum);
        }
    };

    // The smallest x <= 0 for which `is_kept(x)` holds. 0 is kept, and so is every number larger than one that is
    // kept. This is a bisection over the bits of a float's magnitude, which grow with the magnitude.
    template <class IsKept>
    static float min_kept(IsKept is_kept) {
        uint32_t kept = 0, removed = 0x7f800001;  // 0, and beyond infinity
        while (removed - kept > 1) {
            const uint32_t middle = kept + (removed - kept) / 2;
            (is_kept(negative(middle)) ? kept : removed) = middle;
        }
        return negative(kept);
    }

    static float negative(uint32_t bits) {
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        return -magnitude;
    }
};

// Draws a token from logits (size), whose maximum is finite. Tokens that the bitmask excludes count as -inf.
template <class Number>
int64_t draw(const Number* logits, long size, const Params& params, uint64_t key, Bitmask bitmask) {
    static thread_local std::vector<float> scaled;
    const long padded = (size + WIDTH - 1) / WIDTH * WIDTH;
    scaled.resize(padded);
    float* const z = scaled.data();
    const auto lanes = [&](long i) {
        return bitmask.words ? bitmask.lanes(i) & first_lanes(size - i) : first_lanes(size - i);
    };
    Floats maxima = broadcast(MINUS_INFINITY);
    for (long i = 0; i < size; i += WIDTH)
        maxima =
            max(maxima, select(lanes(i), load(logits + i, first_lanes(size - i)), broadcast(MINUS_INFINITY)));
    const Floats shift = broadcast(reduce_max(maxima));
    const Floats temperature = broadcast((float)params.temperature);
    for (long i = 0; i < padded; i += WIDTH) {
        const Floats shifted = load(logits + i, first_lanes(size - i)) - shift;
        store(z + i, select(lanes(i), shifted / temperature, broadcast(MINUS_INFINITY)));
    }
    const Floats threshold = broadcast(params.threshold(z, padded));
    Floats best = broadcast(MINUS_INFINITY);
    Integers winners = Integers{};
    for (long i = 0; i < padded; i += WIDTH) {
        const Floats value = load(z + i), max_score = value + broadcast(MAX_NOISE);
        const Mask can_win = is_greater_or_equal(value, threshold) & is_greater(max_score, best);
        if (count_lanes(can_win) == 0) continue;
        const Integers tokens = broadcast_integer(i) + lane_indices();
        const Floats score = value + gumbel(random_words(tokens, key));
        const Mask wins = is_greater(score, best) & can_win;
        best = select(wins, score, best);
        winners = select(wins, tokens, winners);
    }
    return reduce_min(select(is_equal(best, broadcast(reduce_max(best))), winners, broadcast_integer(size)));
}

template <class Number>
STRUCT(
    DrawArguments,
    (const Number*, logits),             // (N, V)
    (const int64_t*, rows),              // (R): the row of the logits for each of R draws
    (const DrawParameters*, parameters), // (R)
    (const uint64_t*, keys),             // (R)
    (int64_t*, tokens),                  // (R): the results
    (const uint32_t*, bitmasks),         // (N, words_per_row), or null
    (long, num_draws),
    (long, size),  // V
    (long, words_per_row));

template <class Number>
void draw_rows(const DrawArguments<Number>& args, long task, long num_tasks) {
    for (long i = args.num_draws * task / num_tasks; i < args.num_draws * (task + 1) / num_tasks; i++) {
        const long row = args.rows[i];
        const Bitmask bitmask = Bitmask{args.bitmasks, args.words_per_row}.row(row);
        args.tokens[i] =
            draw(args.logits + row * args.size, args.size, Params{args.parameters[i]}, args.keys[i], bitmask);
    }
}

}  // namespace

EXPORT_DESCRIPTION(draw_parameters, DrawParameters)
KERNEL(draw_float32, draw_rows<float>)
KERNEL(draw_bfloat16, draw_rows<BFloat16>)
