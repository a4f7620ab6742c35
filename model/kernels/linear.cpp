// y = x w^T + b for a few rows of x or many.
//
// x (M, K), y (M, N), b (N). w is packed: tiles of 16 outputs, within a tile one vector of 16 outputs for each k in
// float32, for each pair of k in bfloat16: [N / 16][K][16], [N / 16][K / 2][16][2]; the last tile is filled with zeros.
// So every weight is read once, in a row, for up to ROWS rows of x. Sums are float32, over k in order (the matrix unit's,
// 16 pairs at a time, the even k's apart from the odd ones), whatever M is: a row's result does not depend on the rows
// beside it.

#include "amx.h"
#include "kernel.h"
#include "tiles.h"

namespace {

// How weights are packed, some of a row's k's side by side, and in how many steps these are multiplied.
struct InFloat32 {
    using Number = float;
    using Input = float;
    static constexpr int DEPTH = 1, STEPS = 1;
    static Floats weight(const float* w, int) { return load(w); }
    static Floats input(const float* x, int) { return set(*x); }
    static Floats multiply(Floats sum, Floats x, Floats w) { return fma(x, w, sum); }
};

#ifdef __AVX512BF16__
struct InBFloat16 {  // by pairs
    using Number = BFloat16;
    using Input = BFloat16;
    static constexpr int DEPTH = 2, STEPS = 1;
    static __m512bh weight(const BFloat16* w, int) { return (__m512bh)_mm512_loadu_si512(w); }
    static __m512bh input(const BFloat16* x, int) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static Floats multiply(Floats sum, __m512bh x, __m512bh w) { return _mm512_dpbf16_ps(sum, w, x); }
};
#else
struct InBFloat16 {  // in float32, one of a pair after the other
    using Number = BFloat16;
    using Input = float;
    static constexpr int DEPTH = 2, STEPS = 2;
    static Floats weight(const BFloat16* w, int step) {
        const Integers pairs = load_integers(w);
        return as_floats(step ? pairs & set_integer(0xffff0000) : pairs << 16);
    }
    static Floats input(const float* x, int step) { return set(x[step]); }
    static Floats multiply(Floats sum, Floats x, Floats w) { return fma(x, w, sum); }
};
#endif

template <class Format>
struct Product {
    using Number = typename Format::Number;
    static constexpr int ROWS = IS_WIDE ? 12 : 6;  // of x, whose sums are held in registers
    const typename Format::Input* x;
    const Number *w, *b;
    Number* y;
    long N, K;

    long row_bytes() const { return K * sizeof(*x); }
    long tile_bytes() const { return K * WIDTH * sizeof(*w); }

    template <int rows, int tiles, bool of_next>
    void multiply(const Tiles& at) const {
        const auto* const x = this->x + at.row * K;
        const Number* const w = this->w + at.output * K;
        Floats sums[rows][tiles];
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) sums[row][tile] = Floats{};
        for (long k = 0; k < K; k += Format::DEPTH) {
            UNROLL for (int tile = 0; tile < tiles; tile++) at.fetch<of_next>(w, (tile * K + k) * WIDTH);
            UNROLL for (int step = 0; step < Format::STEPS; step++)
                UNROLL for (int row = 0; row < rows; row++)
                    UNROLL for (int tile = 0; tile < tiles; tile++)
                        sums[row][tile] = Format::multiply(
                            sums[row][tile], Format::input(x + row * K + k, step),
                            Format::weight(w + (tile * K + k) * WIDTH, step));
        }
        UNROLL for (int row = 0; row < rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) finish(at, row, tile, sums[row][tile]);
    }

    void finish(const Tiles& at, int row, int tile, Floats sum) const {
        const long n = at.output + tile * WIDTH;
        if (b) sum = sum + load(b + n, at.kept(tile));
        store(y + (at.row + row) * N + n, sum, at.kept(tile));
    }
};

template <class Format, class Number = typename Format::Number>
void linear(Arguments given, long part, long num_parts) {
    const long M = given.size(4), N = given.size(5), K = given.size(6);
    const Product<Format> product = {
        given.array<typename Format::Input>(0), given.array<Number>(1), given.array<Number>(2), given.array<Number>(3),
        N, K,
    };
    multiply_by_best<std::is_same_v<Number, BFloat16>>(product, M, N, part, num_parts);
}

}  // namespace

KERNEL(linear_float32) { linear<InFloat32>(given, part, num_parts); }
KERNEL(linear_bfloat16) { linear<InBFloat16>(given, part, num_parts); }

#ifndef __AVX512BF16__
// x (count) -> the same in float32, as linear_bfloat16 then reads it
KERNEL(widen_bfloat16) {
    const long vectors = (given.size(2) + WIDTH - 1) / WIDTH;
    for (long vector = vectors * part / num_parts; vector < vectors * (part + 1) / num_parts; vector++) {
        const Mask which = first_of(given.size(2) - vector * WIDTH);
        store(given.array<float>(1) + vector * WIDTH, load(given.array<BFloat16>(0) + vector * WIDTH, which), which);
    }
}
#endif
