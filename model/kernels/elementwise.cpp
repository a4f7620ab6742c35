// What stands between a network's products: rows of a table, sums, norms, rotary positions, activations, the way of
// keys and values into the cache, and the largest of the logits. All is computed in float32 and rounded once; a part is
// some of the rows.

#include <cmath>

#include "kernel.h"

namespace {

// Rows of `size` numbers, `stride` apart.
template <class Number>
struct Rows {
    Number* from;
    long stride, size;

    Number* operator[](long row) const { return from + row * stride; }
};

template <class Visit>
void each_row(long count, long part, long num_parts, Visit visit) {
    for (long row = count * part / num_parts; row < count * (part + 1) / num_parts; row++) visit(row);
}

template <class Visit>
void each_vector(long size, Visit visit) {
    for (long i = 0; i < size; i += WIDTH) visit(i, first_of(size - i));
}

// out (N, size) = table[index (N)]
template <class Number>
void take_rows(Arguments given, long part, long num_parts) {
    const Number* table = given.array<Number>(0);
    const int64_t* index = given.array<int64_t>(1);
    const Rows<Number> out = {given.array<Number>(2), given.size(4), given.size(4)};
    each_row(given.size(3), part, num_parts, [&](long row) {
        std::memcpy(out[row], table + index[row] * out.size, out.size * sizeof(Number));
    });
}

// keys and values (slots, size): those of the new tokens, k and v (N, size), go to slot (N)
template <class Number>
void write_rows(Arguments given, long part, long num_parts) {
    const long size = given.size(8);
    const Rows<Number> k = {given.array<Number>(0), given.size(1), size};
    const Rows<Number> v = {given.array<Number>(2), given.size(3), size};
    Number *const keys = given.array<Number>(4), *const values = given.array<Number>(5);
    const int64_t* slots = given.array<int64_t>(6);
    each_row(given.size(7), part, num_parts, [&](long row) {
        std::memcpy(keys + slots[row] * size, k[row], size * sizeof(Number));
        std::memcpy(values + slots[row] * size, v[row], size * sizeof(Number));
    });
}

// out = a + b, `count` numbers
template <class Number>
void add(Arguments given, long part, long num_parts) {
    const Number *a = given.array<Number>(0), *b = given.array<Number>(1);
    Number* out = given.array<Number>(2);
    const long count = given.size(3), vectors = (count + WIDTH - 1) / WIDTH;
    each_row(vectors, part, num_parts, [&](long vector) {
        const long i = vector * WIDTH;
        const Mask which = first_of(count - i);
        store(out + i, load(a + i, which) + load(b + i, which), which);
    });
}

// x: `outer` times `inner` rows of `size` -> out, all rows in a row: less its mean where it is `centred` (LayerNorm,
// else RMSNorm), over its scale, times weight, plus bias where there is one. `scales` of the rows and what is before the
// weight, `normalized`, where they are wanted.
template <class Number>
void norm(Arguments given, long part, long num_parts) {
    const Number *x = given.array<Number>(0), *weight = given.array<Number>(1), *bias = given.array<Number>(2);
    const long inner = given.size(5), outer_stride = given.size(6), inner_stride = given.size(7), size = given.size(8);
    const float eps = given.number(9);
    float* const scales = given.array<float>(11);
    Number* const normalized = given.array<Number>(12);
    each_row(given.size(4) * inner, part, num_parts, [&](long row) {
        const Number* from = x + row / inner * outer_stride + row % inner * inner_stride;
        Number* to = given.array<Number>(3) + row * size;
        Floats shift = Floats{}, squares = Floats{};
        if (given.size(10)) {
            each_vector(size, [&](long i, Mask which) { shift = shift + load(from + i, which); });
            shift = set(sum_of(shift) / size);
        }
        each_vector(size, [&](long i, Mask which) {
            const Floats centred = select(which, load(from + i, which) - shift, Floats{});
            squares = fma(centred, centred, squares);
        });
        const float scale = std::sqrt(sum_of(squares) / size + eps);
        if (scales) scales[row] = scale;
        const Floats factor = set(1.0f / scale);
        each_vector(size, [&](long i, Mask which) {
            Floats value = (load(from + i, which) - shift) * factor;
            if (normalized) store(normalized + row * size + i, value, which);
            value = value * load(weight + i, which);
            if (bias) value = value + load(bias + i, which);
            store(to + i, value, which);
        });
    });
}

// positions (N), frequencies (D/2) -> cosines and sines (N, D/2) in float32, times `factor`
void rotation(Arguments given, long part, long num_parts) {
    const int64_t* positions = given.array<int64_t>(0);
    const float* frequencies = given.array<float>(1);
    const long half = given.size(5);
    each_row(given.size(4), part, num_parts, [&](long row) {
        for (long i = 0; i < half; i++) {
            const float angle = positions[row] * frequencies[i];
            given.array<float>(2)[row * half + i] = std::cos(angle) * given.number(6);
            given.array<float>(3)[row * half + i] = std::sin(angle) * given.number(6);
        }
    });
}

// x (N, heads, D) -> out: each pair (i, i + D/2) of a head turned by its angle
template <class Number>
void rotate(Arguments given, long part, long num_parts) {
    const long heads = given.size(6), half = given.size(7) / 2, period = given.size(8);
    const Rows<Number> x = {given.array<Number>(0), given.size(1), heads * 2 * half};
    const Rows<Number> out = {given.array<Number>(2), x.size, x.size};
    each_row(given.size(5), part, num_parts, [&](long row) {
        const float* const cosines = given.array<float>(3) + row % period * half;
        const float* const sines = given.array<float>(4) + row % period * half;
        for (long head = 0; head < heads; head++) {
            const Number* from = x[row] + head * 2 * half;
            Number* to = out[row] + head * 2 * half;
            each_vector(half, [&](long i, Mask which) {
                const Floats cosine = load(cosines + i, which), sine = load(sines + i, which);
                const Floats first = load(from + i, which), second = load(from + half + i, which);
                store(to + i, fma(first, cosine, Floats{} - second * sine), which);
                store(to + half + i, fma(second, cosine, first * sine), which);
            });
        }
    });
}

Floats sigmoid(Floats x) {
    const Floats one = set(1.0f);
    return one / (one + exponential(Floats{} - x));
}

Floats silu(Floats x) { return x * sigmoid(x); }

// x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
Floats gelu_tanh(Floats x) {
    const Floats cubed = x * x * x;
    const Floats inner = fma(set(0.044715f), cubed, x);
    return x * sigmoid(set(1.5957691216f) * inner);
}

Floats relu(Floats x) { return max(Floats{}, x); }  // NaN stays

// pre (N, size) -> out = activation(pre), times linear (N, size) where there is one
template <class Number, Floats (*activation)(Floats)>
void activate(Arguments given, long part, long num_parts) {
    const long size = given.size(6), vectors = (size + WIDTH - 1) / WIDTH;
    const Rows<Number> pre = {given.array<Number>(0), given.size(1), size}, out = {given.array<Number>(4), size, size};
    const Rows<Number> linear = {given.array<Number>(2), given.size(3), size};
    const long count = given.size(5) * vectors;
    const long begin = count * part / num_parts, end = count * (part + 1) / num_parts;
    for (long row = begin / vectors; row * vectors < end; row++) {  // some rows, the first and last of them in part
        const long last = std::min(vectors, end - row * vectors);
        for (long vector = std::max(0L, begin - row * vectors); vector < last; vector++) {
            const long i = vector * WIDTH;
            const Mask which = first_of(size - i);
            Floats value = activation(load(pre[row] + i, which));
            if (linear.from) value = value * load(linear[row] + i, which);
            store(out[row] + i, value, which);
        }
    }
}

// x (N, size) -> ln of the sum of e^x of each row (N), and e^x over that sum (N, size) where it is wanted; float32
template <class Number>
void distribution(Arguments given, long part, long num_parts) {
    const long size = given.size(4);
    each_row(given.size(3), part, num_parts, [&](long row) {
        const Number* x = given.array<Number>(0) + row * size;
        float* const probabilities = given.array<float>(1) ? given.array<float>(1) + row * size : nullptr;
        Floats most = set(-INFINITY), sum = Floats{};
        each_vector(size, [&](long i, Mask which) {
            most = max(most, select(which, load(x + i, which), set(-INFINITY)));
        });
        const float shift = most_of(most);
        each_vector(size, [&](long i, Mask which) {
            const Floats value = exponential(load(x + i, which) - set(shift));
            sum = sum + select(which, value, Floats{});
            if (probabilities) store(probabilities + i, value, which);
        });
        const float total = sum_of(sum);
        given.array<float>(2)[row] = shift + std::log(total);
        if (probabilities)
            each_vector(size, [&](long i, Mask which) {
                store(probabilities + i, load(probabilities + i, which) / set(total), which);
            });
    });
}

// x (N, size) -> the largest number of each row and where it first stands; NaN where any is NaN
template <class Number>
void largest(Arguments given, long part, long num_parts) {
    const long size = given.size(4);
    each_row(given.size(3), part, num_parts, [&](long row) {
        const Number* x = given.array<Number>(0) + row * size;
        Floats most = set(-INFINITY);
        Integers where = Integers{};
        Mask unordered = {};
        each_vector(size, [&](long i, Mask which) {
            const Floats value = load(x + i, which);
            const Mask is_larger = is_more(value, most) & which;
            most = select(is_larger, value, most);
            where = select(is_larger, set_integer(i), where);
            unordered = unordered | is_nan(value);
        });
        const float value = most_of(most);
        const Integers found = select(is_equal(most, set(value)), where + lanes(), set_integer(size));
        given.array<float>(1)[row] = count_of(unordered) ? NAN : value;
        given.array<int64_t>(2)[row] = least_of(found);
    });
}

Mask finite_of(Floats value, Mask which) {
    return is_more(set(INFINITY), abs(value)) & which;
}

struct Moments {
    double least = INFINITY, largest = -INFINITY, count = 0, mean = 0, deviation = 0;  // the latter: sum of squares

    // Those of both together (Chan, Golub and LeVeque 1983).
    void add(const Moments& other) {
        if (other.count == 0) return;
        const double total = count + other.count, apart = other.mean - mean;
        deviation += other.deviation + apart * apart * count * other.count / total;
        mean += apart * other.count / total;
        count = total;
        least = std::min(least, other.least);
        largest = std::max(largest, other.largest);
    }
};

// Of the finite ones of a few thousand numbers, which stay in the cache: their mean, then the differences from it.
// Several sums at a time, since each addition takes some cycles; meanwhile the numbers behind them are fetched. That all
// are finite and fill their vectors is `hoped`, which takes half as long: a sum that is finite says that it was right.
template <bool hoped, class Number>
Moments moments_of(const Number* x, long size) {
    constexpr int SUMS = 4;
    if (hoped && size % (SUMS * WIDTH)) return moments_of<false>(x, size);
    Floats least[SUMS], most[SUMS], sum[SUMS], squares[SUMS], rest[SUMS];
    UNROLL for (int j = 0; j < SUMS; j++) {
        least[j] = set(INFINITY), most[j] = set(-INFINITY);
        sum[j] = squares[j] = rest[j] = Floats{};
    }
    const auto each = [&](auto visit) {
        for (long i = 0; i < size; i += SUMS * WIDTH)
            UNROLL for (int j = 0; j < SUMS; j++) {
                const Number* const from = x + i + j * WIDTH;
                const Mask which = first_of(size - i - j * WIDTH);
                const Floats value = hoped ? load(from) : load(from, which);
                visit(j, from, value, finite_of(value, which));
            }
    };
    const auto where = [](Mask which, Floats a, Floats b) { return hoped ? a : select(which, a, b); };
    long count = 0;
    each([&](int j, const Number*, Floats value, Mask finite) {
        least[j] = min(least[j], where(finite, value, set(INFINITY)));
        most[j] = max(most[j], where(finite, value, set(-INFINITY)));
        sum[j] = sum[j] + where(finite, value, Floats{});
        count += hoped ? WIDTH : count_of(finite);
    });
    if (count == 0) return {};
    const auto total = [](const Floats (&sums)[SUMS]) {
        return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    };
    const float mean = total(sum) / count;
    if (hoped && !std::isfinite(mean)) return moments_of<false>(x, size);
    each([&](int j, const Number* from, Floats value, Mask finite) {
        _mm_prefetch((const char*)(from + size), _MM_HINT_T0);
        const Floats centred = where(finite, value - set(mean), Floats{});
        squares[j] = fma(centred, centred, squares[j]);
        rest[j] = rest[j] + centred;  // what the rounding of the mean left
    });
    UNROLL for (int j = 1; j < SUMS; j++) {
        least[0] = min(least[0], least[j]);
        most[0] = max(most[0], most[j]);
    }
    const double left = static_cast<double>(total(rest)) / count;
    return {least_of(least[0]), most_of(most[0]), static_cast<double>(count), mean + left,
            total(squares) - left * left * count};
}

// Some numbers of a dtype: where they lie, how many, in rows of a size and a stride apart.
struct Layout {
    int64_t address, count, stride, size;

    static constexpr long PIECE = 1 << 14;
    long num_pieces() const { return (count + PIECE - 1) / PIECE; }
};

// Layouts (N) -> Moments of all their pieces, one after the other
template <class Number>
void moments(Arguments given, long part, long num_parts) {
    constexpr long STRETCH = 256 * WIDTH;
    const Layout* const layouts = given.array<Layout>(0);
    long total = 0, index = 0;
    for (long n = 0; n < given.size(2); n++) total += layouts[n].num_pieces();
    for (long n = 0; n < given.size(2); n++) {
        const Layout& at = layouts[n];
        const Rows<Number> x = {(Number*)at.address, at.stride, at.size};
        for (long begin = 0; begin < at.count; begin += Layout::PIECE, index++) {
            if (index < total * part / num_parts || index >= total * (part + 1) / num_parts) continue;
            Moments& all = given.array<Moments>(1)[index] = {};
            for (long next, i = begin, end = std::min(begin + Layout::PIECE, at.count); i < end; i = next) {
                next = std::min({i + STRETCH, (i / at.size + 1) * at.size, end});
                all.add(moments_of<true>(x[i / at.size] + i % at.size, next - i));
            }
        }
    }
}

// Layouts (N), Moments of their pieces -> of each its least and largest number, mean, standard deviation, norm, and how
// many are not finite (N, 6)
void summaries(Arguments given) {
    const Layout* const layouts = given.array<Layout>(0);
    const Moments* piece = given.array<Moments>(1);
    for (long n = 0; n < given.size(3); n++) {
        Moments all;
        for (const Moments* const end = piece + layouts[n].num_pieces(); piece < end; piece++) all.add(*piece);
        const double squares = std::max(0.0, all.deviation);
        const double found[] = {all.least, all.largest, all.mean, std::sqrt(squares / all.count),
                                std::sqrt(squares + all.count * all.mean * all.mean), layouts[n].count - all.count};
        std::memcpy(given.array<double>(2) + 6 * n, found, sizeof found);
    }
}

}  // namespace

KERNEL(summaries_float32) { summaries(given); }
KERNEL(rotation_float32) { rotation(given, part, num_parts); }

#define KERNELS(Number, dtype)                                                                      \
    KERNEL(take_rows_##dtype) { take_rows<Number>(given, part, num_parts); }                        \
    KERNEL(write_rows_##dtype) { write_rows<Number>(given, part, num_parts); }                      \
    KERNEL(add_##dtype) { add<Number>(given, part, num_parts); }                                    \
    KERNEL(norm_##dtype) { norm<Number>(given, part, num_parts); }                                  \
    KERNEL(rotate_##dtype) { rotate<Number>(given, part, num_parts); }                              \
    KERNEL(largest_##dtype) { largest<Number>(given, part, num_parts); }                            \
    KERNEL(distribution_##dtype) { distribution<Number>(given, part, num_parts); }                  \
    KERNEL(moments_##dtype) { moments<Number>(given, part, num_parts); }                            \
    KERNEL(silu_##dtype) { activate<Number, silu>(given, part, num_parts); }                        \
    KERNEL(gelu_tanh_##dtype) { activate<Number, gelu_tanh>(given, part, num_parts); }              \
    KERNEL(relu_##dtype) { activate<Number, relu>(given, part, num_parts); }

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
