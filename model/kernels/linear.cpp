// y = x w^T + b for a few rows of x or many, by a CPU with AVX-512.
//
// x (M, K), y (M, N), b (N). w is packed: tiles of 16 outputs, within a tile one vector of 16 outputs for each k in
// float32, for each pair of k in bfloat16: [N / 16][K][16], [N / 16][K / 2][16][2]; the last tile is filled with zeros.
// So every weight is read once, in a row, for up to ROWS rows of x. Sums are float32, over k in order, whatever M is: a
// row's result does not depend on the rows beside it.

#ifndef __AVX512F__
#error "the CPU has no AVX-512"
#endif

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int TILE = 16;  // outputs
constexpr int ROWS = 12;  // of x that are held in registers
constexpr int TILES = 2;  // likewise

struct Float32 {
    using Number = float;
    static constexpr int DEPTH = 1;  // k's in a vector
    static __m512 multiply(__m512 sum, const float* x, const float* w) {
        return _mm512_fmadd_ps(_mm512_set1_ps(*x), _mm512_loadu_ps(w), sum);
    }
    static __m512 load(const float* from, __mmask16 which) { return _mm512_maskz_loadu_ps(which, from); }
    static void store(float* to, __m512 sum, __mmask16 which) { _mm512_mask_storeu_ps(to, which, sum); }
};

#ifdef __AVX512BF16__
struct BFloat16 {
    using Number = uint16_t;
    static constexpr int DEPTH = 2;
    static __m512 multiply(__m512 sum, const uint16_t* x, const uint16_t* w) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
    }
    static __m512 load(const uint16_t* from, __mmask16 which) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from)), 16));
    }
    static void store(uint16_t* to, __m512 sum, __mmask16 which) {
        _mm256_mask_storeu_epi16(to, which, (__m256i)_mm512_cvtneps_pbh(sum));
    }
};
#endif

// A block of the product: some rows of x by one or two tiles of w. `kept` are the outputs of each tile that exist.
template <class Number>
struct Block {
    const Number *x, *w, *b;
    Number* y;
    long N, K;
    __mmask16 kept[TILES];
};

template <class Format, int rows, int tiles>
void multiply_block(const Block<typename Format::Number>& at) {
    __m512 sums[rows][tiles];
    for (int tile = 0; tile < tiles; tile++) {
        const __m512 first = at.b ? Format::load(at.b + tile * TILE, at.kept[tile]) : _mm512_setzero_ps();
        for (int row = 0; row < rows; row++) sums[row][tile] = first;
    }
    for (long k = 0; k < at.K; k += Format::DEPTH)
        for (int row = 0; row < rows; row++)
            for (int tile = 0; tile < tiles; tile++)
                sums[row][tile] =
                    Format::multiply(sums[row][tile], at.x + row * at.K + k, at.w + (tile * at.K + k) * TILE);
    for (int row = 0; row < rows; row++)
        for (int tile = 0; tile < tiles; tile++)
            Format::store(at.y + row * at.N + tile * TILE, sums[row][tile], at.kept[tile]);
}

// The block of the first `num_rows` rows, at most ROWS. Their number is compiled in, so that the sums stay in registers.
template <class Format, int tiles, int rows = ROWS>
void multiply_rows(long num_rows, const Block<typename Format::Number>& at) {
    if constexpr (rows > 1)
        if (num_rows < rows) return multiply_rows<Format, tiles, rows - 1>(num_rows, at);
    multiply_block<Format, rows, tiles>(at);
}

__mmask16 first_of(long count) { return count >= TILE ? 0xffff : (1 << std::max(count, 0L)) - 1; }

template <class Format, class Number = typename Format::Number>
void linear(const Number* x, const Number* w, const Number* b, Number* y, long M, long N, long K) {
    const long num_tiles = (N + TILE - 1) / TILE, num_pairs = (num_tiles + TILES - 1) / TILES;
#pragma omp parallel
    {
        const long thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        for (long pair = num_pairs * thread / num_threads; pair < num_pairs * (thread + 1) / num_threads; pair++) {
            const long n = pair * TILES * TILE;
            for (long m = 0; m < M; m += ROWS) {
                const Block<Number> at = {x + m * K, w + n * K, b ? b + n : nullptr, y + m * N + n,
                                          N,         K,         {first_of(N - n), first_of(N - n - TILE)}};
                if (N - n > TILE)
                    multiply_rows<Format, TILES>(M - m, at);
                else
                    multiply_rows<Format, 1>(M - m, at);
            }
        }
    }
}

}  // namespace

extern "C" void linear_float32(const float* x, const float* w, const float* b, float* y, long M, long N, long K) {
    linear<Float32>(x, w, b, y, M, N, K);
}

#ifdef __AVX512BF16__
extern "C" void linear_bfloat16(const uint16_t* x, const uint16_t* w, const uint16_t* b, uint16_t* y, long M, long N,
                                long K) {
    linear<BFloat16>(x, w, b, y, M, N, K);
}
#endif
