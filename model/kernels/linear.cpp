// y = x w^T + b for a few rows of x or many.
//
// x (M, K), y (M, N), b (N). w is packed: tiles of 16 outputs, within a tile one vector of 16 outputs for each k in
// float32, for each pair of k in bfloat16: [N / 16][K][16], [N / 16][K / 2][16][2]; the last tile is filled with zeros.
// So every weight is read once, in a row, for up to ROWS rows of x. Sums are float32, over k in order, whatever M is: a
// row's result does not depend on the rows beside it.

#include "kernel.h"
#include "tiles.h"

namespace {

struct InFloat32 {
    using Number = float;
    static constexpr int DEPTH = 1;  // k's in a vector
    static __m512 multiply(__m512 sum, const float* x, const float* w) {
        return _mm512_fmadd_ps(_mm512_set1_ps(*x), _mm512_loadu_ps(w), sum);
    }
};

#ifdef __AVX512BF16__
struct InBFloat16 {
    using Number = BFloat16;
    static constexpr int DEPTH = 2;
    static __m512 multiply(__m512 sum, const BFloat16* x, const BFloat16* w) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
    }
};
#endif

template <class Format>
struct Product {
    using Number = typename Format::Number;
    static constexpr int ROWS = 12;  // of x that are held in registers
    const Number *x, *w, *b;
    Number* y;
    long N, K;

    long tile_bytes() const { return K * WIDTH * sizeof(Number); }

    template <int rows, int tiles, bool of_next>
    void multiply(const Tiles& at) const {
        const Number *x = this->x + at.row * K, *w = this->w + at.output * K;
        __m512 sums[rows][tiles];
        UNROLL for (int tile = 0; tile < tiles; tile++) {
            const __m512 first = b ? load(b + at.output + tile * WIDTH, at.kept(tile)) : _mm512_setzero_ps();
            UNROLL for (int row = 0; row < rows; row++) sums[row][tile] = first;
        }
        for (long k = 0; k < K; k += Format::DEPTH) {
            UNROLL for (int tile = 0; tile < tiles; tile++) at.fetch<of_next>(w, (tile * K + k) * WIDTH);
            UNROLL for (int row = 0; row < rows; row++)
                UNROLL for (int tile = 0; tile < tiles; tile++)
                    sums[row][tile] = Format::multiply(sums[row][tile], x + row * K + k, w + (tile * K + k) * WIDTH);
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++)
                store(y + (at.row + row) * N + at.output + tile * WIDTH, sums[row][tile], at.kept(tile));
    }
};

template <class Format, class Number = typename Format::Number>
void linear(Arguments given, long part, long num_parts) {
    const long M = given.size(4), N = given.size(5), K = given.size(6);
    const Product<Format> product = {
        given.array<Number>(0), given.array<Number>(1), given.array<Number>(2), given.array<Number>(3), N, K,
    };
    multiply_all(product, M, N, part, num_parts);
}

}  // namespace

KERNEL(linear_float32) { linear<InFloat32>(given, part, num_parts); }
#ifdef __AVX512BF16__
KERNEL(linear_bfloat16) { linear<InBFloat16>(given, part, num_parts); }
#endif
