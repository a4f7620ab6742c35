// y = x w^T + b with weights of 8 or 4 bits, by the CPU's products of bytes (VNNI).
//
// Each row of x is rounded to bytes in [-127, 127] with a scale of its own; sums of products of integers are exact, so
// a row's result does not depend on the rows beside it. Weights are unsigned bytes: 128, or 8, is subtracted by way of
// the sum of the row's bytes. Packed in tiles of 16 outputs:
//   int8: [N / 16][K / 4][16][4] bytes w + 128, one scale an output.
//   int4: [N / 16][K / 32][4][16][4] bytes. Of the 32 k's of a group, byte [j][output][i] holds w + 8 of k = 8 j + i in
//         its low half, of k = 8 j + 4 + i in its high half; one float16 scale a group and output.

#include <cmath>

#include "kernel.h"
#include "tiles.h"

#ifdef __AVX512VNNI__

namespace {

constexpr int GROUP = 32;  // k's that share a scale in int4

// x (M, K) -> bytes (M, K), scale (M) of each row, and the sum of the bytes of each `group` k's (M, K / group), times
// `offset`.
template <class Number>
void quantize(Arguments given, long part, long num_parts) {
    const Number* x = given.array<Number>(0);
    const long M = given.size(4), K = given.size(5), group = given.size(6), offset = given.size(7);
    for (long row = M * part / num_parts; row < M * (part + 1) / num_parts; row++) {
        const Number* from = x + row * K;
        int8_t* to = given.array<int8_t>(1) + row * K;
        int32_t* sums = given.array<int32_t>(3) + row * (K / group);
        __m512 largest = _mm512_setzero_ps();
        __mmask16 unordered = 0;
        for (long k = 0; k < K; k += WIDTH) {
            const __m512 value = load(from + k, first_of(K - k));
            largest = _mm512_max_ps(largest, _mm512_abs_ps(value));
            unordered |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        }
        const float most = unordered ? NAN : _mm512_reduce_max_ps(largest);
        given.array<float>(2)[row] = most / 127;
        const __m512 factor = _mm512_set1_ps(most > 0 ? 127 / most : 0);
        for (long k = 0; k < K; k += WIDTH) {
            const __mmask16 which = first_of(K - k);
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load(from + k, which), factor));
            _mm_mask_storeu_epi8(to + k, which, _mm512_cvtsepi32_epi8(rounded));
        }
        for (long k = 0; k < K; k += group) {
            int32_t sum = 0;
            for (long i = k; i < k + group; i++) sum += to[i];
            sums[k / group] = sum * static_cast<int32_t>(offset);
        }
    }
}

__m512i multiply_bytes(__m512i sum, __m512i w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
}

template <class Number>
struct Quantized {
    const int8_t* x;
    const float* x_scales;
    const int32_t* sums;
    const uint8_t* w;
    const Number* b;
    Number* y;
    long N, K;

    // The sums of one row and tile, in units of the weight's scale.
    void finish(const Tiles& at, int row, int tile, __m512 sum) const {
        const long n = at.output + tile * WIDTH;
        sum = _mm512_mul_ps(sum, _mm512_set1_ps(x_scales[at.row + row]));
        if (b) sum = _mm512_add_ps(sum, load(b + n, at.kept(tile)));
        store(y + (at.row + row) * N + n, sum, at.kept(tile));
    }
};

template <class Number>
struct Int8 : Quantized<Number> {
    static constexpr int ROWS = 12;
    const float* scales;

    long tile_bytes() const { return this->K * WIDTH; }

    template <int rows, int tiles, bool of_next>
    void multiply(const Tiles& at) const {
        const long K = this->K;
        const int8_t* x = this->x + at.row * K;
        const uint8_t* w = this->w + at.output * K;
        __m512i sums[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++)
                sums[row][tile] = _mm512_set1_epi32(this->sums[at.row + row]);
        for (long k = 0; k < K; k += 4) {
            UNROLL for (int tile = 0; tile < tiles; tile++) at.fetch<of_next>(w, (tile * K + k) * WIDTH);
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++)
                    sums[row][tile] = multiply_bytes(
                        sums[row][tile], _mm512_loadu_si512(w + (tile * K + k) * WIDTH), x + row * K + k);
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) {
                const __m512 scale = load(scales + at.output + tile * WIDTH, at.kept(tile));
                this->finish(at, row, tile, _mm512_mul_ps(_mm512_cvtepi32_ps(sums[row][tile]), scale));
            }
    }
};

template <class Number>
struct Int4 : Quantized<Number> {
    static constexpr int ROWS = 6;
    const uint16_t* scales;

    long tile_bytes() const { return this->K * WIDTH / 2; }

    template <int rows, int tiles, bool of_next>
    void multiply(const Tiles& at) const {
        const long K = this->K, num_groups = K / GROUP;
        const int8_t* x = this->x + at.row * K;
        const uint8_t* w = this->w + at.output * K / 2;
        const __m512i low = _mm512_set1_epi8(15);
        __m512 totals[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) totals[row][tile] = _mm512_setzero_ps();
        for (long group = 0; group < num_groups; group++) {
            __m512i sums[rows][tiles];
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++)
                    sums[row][tile] = _mm512_set1_epi32(this->sums[(at.row + row) * num_groups + group]);
            for (int eight = 0; eight < GROUP; eight += 8)
                UNROLL for (int tile = 0; tile < tiles; tile++) {
                    const long offset = (tile * K + group * GROUP + eight) / 2 * WIDTH;
                    at.fetch<of_next>(w, offset);
                    const __m512i both = _mm512_loadu_si512(w + offset);
                    const __m512i first = _mm512_and_si512(both, low);
                    const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                    UNROLL for (int row = 0; row < rows; row++) {
                        const int8_t* four = x + row * K + group * GROUP + eight;
                        sums[row][tile] = multiply_bytes(sums[row][tile], first, four);
                        sums[row][tile] = multiply_bytes(sums[row][tile], second, four + 4);
                    }
                }
            UNROLL for (int tile = 0; tile < tiles; tile++) {
                const long at_scale = ((at.output / WIDTH + tile) * num_groups + group) * WIDTH;
                const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(scales + at_scale)));
                UNROLL for (int row = 0; row < rows; row++)
                    totals[row][tile] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row][tile]), scale, totals[row][tile]);
            }
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) this->finish(at, row, tile, totals[row][tile]);
    }
};

template <template <class> class Product, class Number, class Scale>
void linear(Arguments given, long part, long num_parts) {
    const long M = given.size(7), N = given.size(8), K = given.size(9);
    const Product<Number> product = {
        {given.array<int8_t>(0), given.array<float>(1), given.array<int32_t>(2), given.array<uint8_t>(3),
         given.array<Number>(5), given.array<Number>(6), N, K},
        given.array<Scale>(4),
    };
    multiply_all(product, M, N, part, num_parts);
}

}  // namespace

#define KERNELS(Number, dtype)                                                                      \
    KERNEL(quantize_##dtype) { quantize<Number>(given, part, num_parts); }                          \
    KERNEL(linear_int8_##dtype) { linear<Int8, Number, float>(given, part, num_parts); }            \
    KERNEL(linear_int4_##dtype) { linear<Int4, Number, uint16_t>(given, part, num_parts); }

KERNELS(float, float32)
#ifdef __AVX512BF16__
KERNELS(BFloat16, bfloat16)
#endif

#endif  // without VNNI there is no kernel here
