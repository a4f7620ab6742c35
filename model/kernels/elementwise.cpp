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
        const __mmask16 which = first_of(count - i);
        store(out + i, _mm512_add_ps(load(a + i, which), load(b + i, which)), which);
    });
}

// x: `outer` times `inner` rows of `size` -> out, all rows in a row: less its mean where it is `centred` (LayerNorm,
// else RMSNorm), over its scale, times weight, plus bias, where there are these. `scales` of the rows, where wanted.
template <class Number>
void norm(Arguments given, long part, long num_parts) {
    const Number *x = given.array<Number>(0), *weight = given.array<Number>(1), *bias = given.array<Number>(2);
    const long inner = given.size(5), outer_stride = given.size(6), inner_stride = given.size(7), size = given.size(8);
    const float eps = given.number(9);
    float* const scales = given.array<float>(11);
    each_row(given.size(4) * inner, part, num_parts, [&](long row) {
        const Number* from = x + row / inner * outer_stride + row % inner * inner_stride;
        Number* to = given.array<Number>(3) + row * size;
        __m512 shift = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        if (given.size(10)) {
            each_vector(size, [&](long i, __mmask16 which) { shift = _mm512_add_ps(shift, load(from + i, which)); });
            shift = _mm512_set1_ps(_mm512_reduce_add_ps(shift) / size);
        }
        each_vector(size, [&](long i, __mmask16 which) {
            const __m512 centred = _mm512_maskz_sub_ps(which, load(from + i, which), shift);
            squares = _mm512_fmadd_ps(centred, centred, squares);
        });
        const float scale = std::sqrt(_mm512_reduce_add_ps(squares) / size + eps);
        if (scales) scales[row] = scale;
        const __m512 factor = _mm512_set1_ps(1.0f / scale);
        each_vector(size, [&](long i, __mmask16 which) {
            __m512 value = _mm512_mul_ps(_mm512_sub_ps(load(from + i, which), shift), factor);
            if (weight) value = _mm512_mul_ps(value, load(weight + i, which));
            if (bias) value = _mm512_add_ps(value, load(bias + i, which));
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
            each_vector(half, [&](long i, __mmask16 which) {
                const __m512 cosine = load(cosines + i, which), sine = load(sines + i, which);
                const __m512 first = load(from + i, which), second = load(from + half + i, which);
                store(to + i, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)), which);
                store(to + half + i, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)), which);
            });
        }
    });
}

__m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

__m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }

// x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
__m512 gelu_tanh(__m512 x) {
    const __m512 cubed = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cubed, x);
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(_mm512_set1_ps(1.5957691216f), inner)));
}

__m512 relu(__m512 x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }  // NaN stays

// pre (N, size) -> out = activation(pre), times linear (N, size) where there is one
template <class Number, __m512 (*activation)(__m512)>
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
            const __mmask16 which = first_of(size - i);
            __m512 value = activation(load(pre[row] + i, which));
            if (linear.from) value = _mm512_mul_ps(value, load(linear[row] + i, which));
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
        __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        each_vector(size, [&](long i, __mmask16 which) {
            most = _mm512_mask_max_ps(most, which, most, load(x + i, which));
        });
        const float shift = _mm512_reduce_max_ps(most);
        each_vector(size, [&](long i, __mmask16 which) {
            const __m512 value = exponential(_mm512_sub_ps(load(x + i, which), _mm512_set1_ps(shift)));
            sum = _mm512_mask_add_ps(sum, which, sum, value);
            if (probabilities) store(probabilities + i, value, which);
        });
        const float total = _mm512_reduce_add_ps(sum);
        given.array<float>(2)[row] = shift + std::log(total);
        if (probabilities)
            each_vector(size, [&](long i, __mmask16 which) {
                store(probabilities + i, _mm512_div_ps(load(probabilities + i, which), _mm512_set1_ps(total)), which);
            });
    });
}

// x (N, size) -> the largest number of each row and where it first stands; NaN where any is NaN
template <class Number>
void largest(Arguments given, long part, long num_parts) {
    const long size = given.size(4);
    each_row(given.size(3), part, num_parts, [&](long row) {
        const Number* x = given.array<Number>(0) + row * size;
        __m512 most = _mm512_set1_ps(-INFINITY);
        __m512i where = _mm512_setzero_si512();
        __mmask16 unordered = 0;
        each_vector(size, [&](long i, __mmask16 which) {
            const __m512 value = load(x + i, which);
            const __mmask16 is_more = _mm512_mask_cmp_ps_mask(which, value, most, _CMP_GT_OQ);
            most = _mm512_mask_mov_ps(most, is_more, value);
            where = _mm512_mask_mov_epi32(where, is_more, _mm512_set1_epi32(i));
            unordered |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        });
        const float value = _mm512_reduce_max_ps(most);
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __mmask16 equal = _mm512_cmp_ps_mask(most, _mm512_set1_ps(value), _CMP_EQ_OQ);
        given.array<float>(1)[row] = unordered ? NAN : value;
        given.array<int64_t>(2)[row] = _mm512_mask_reduce_min_epi32(equal, _mm512_add_epi32(where, lanes));
    });
}

__mmask16 finite_of(__m512 value, __mmask16 which) {
    return _mm512_mask_cmp_ps_mask(which, _mm512_abs_ps(value), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
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
// Several sums at a time, since each addition takes some cycles; meanwhile the numbers behind them are fetched.
template <class Number>
Moments moments_of(const Number* x, long size) {
    constexpr int SUMS = 4;
    __m512 least[SUMS], most[SUMS], sum[SUMS], squares[SUMS], rest[SUMS];
    UNROLL for (int j = 0; j < SUMS; j++) {
        least[j] = _mm512_set1_ps(INFINITY), most[j] = _mm512_set1_ps(-INFINITY);
        sum[j] = squares[j] = rest[j] = _mm512_setzero_ps();
    }
    const auto each = [&](auto visit) {
        for (long i = 0; i < size; i += SUMS * WIDTH)
            UNROLL for (int j = 0; j < SUMS; j++) visit(j, x + i + j * WIDTH, first_of(size - i - j * WIDTH));
    };
    long count = 0;
    each([&](int j, const Number* from, __mmask16 which) {
        const __m512 value = load(from, which);
        const __mmask16 finite = finite_of(value, which);
        least[j] = _mm512_mask_min_ps(least[j], finite, least[j], value);
        most[j] = _mm512_mask_max_ps(most[j], finite, most[j], value);
        sum[j] = _mm512_mask_add_ps(sum[j], finite, sum[j], value);
        count += _mm_popcnt_u32(finite);
    });
    if (count == 0) return {};
    const auto total = [](const __m512 (&sums)[SUMS]) {
        return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
    };
    const float mean = total(sum) / count;
    each([&](int j, const Number* from, __mmask16 which) {
        _mm_prefetch((const char*)(from + size), _MM_HINT_T0);
        const __m512 value = load(from, which), centred = _mm512_sub_ps(value, _mm512_set1_ps(mean));
        const __mmask16 finite = finite_of(value, which);
        squares[j] = _mm512_mask3_fmadd_ps(centred, centred, squares[j], finite);
        rest[j] = _mm512_mask_add_ps(rest[j], finite, rest[j], centred);  // what the rounding of the mean left
    });
    UNROLL for (int j = 1; j < SUMS; j++) {
        least[0] = _mm512_min_ps(least[0], least[j]);
        most[0] = _mm512_max_ps(most[0], most[j]);
    }
    const double left = static_cast<double>(total(rest)) / count;
    return {_mm512_reduce_min_ps(least[0]), _mm512_reduce_max_ps(most[0]), static_cast<double>(count), mean + left,
            total(squares) - left * left * count};
}

// x (N, size) -> Moments of each part (num_parts, 5)
template <class Number>
void moments(Arguments given, long part, long num_parts) {
    constexpr long STRETCH = 256 * WIDTH;
    const long count = given.size(2), size = given.size(4);
    const Rows<Number> x = {given.array<Number>(0), given.size(3), size};
    Moments all;
    for (long next, i = count * part / num_parts, end = count * (part + 1) / num_parts; i < end; i = next) {
        next = std::min({i + STRETCH, (i / size + 1) * size, end});
        all.add(moments_of(x[i / size] + i % size, next - i));
    }
    given.array<Moments>(1)[part] = all;
}

// Moments (count, 5): those of all together in place of the first.
void join(Arguments given, long part, long num_parts) {
    Moments* const moments = given.array<Moments>(0);
    for (long index = 1; index < given.size(1); index++) moments->add(moments[index]);
}

}  // namespace

KERNEL(join_float32) { join(given, part, num_parts); }
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
#ifdef __AVX512BF16__
KERNELS(BFloat16, bfloat16)
#endif
