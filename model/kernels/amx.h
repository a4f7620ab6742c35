// Products by the CPU's matrix unit (Intel's AMX): of 16 rows of x, 64 bytes of each, and 16 outputs at a time. Weights
// packed for pairs of bfloat16 or for four bytes lie as it wants them.

#pragma once

#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

#include <type_traits>

constexpr long LINE = 64;  // bytes of a row

// Whether the system lets this process use it.
inline bool is_amx_allowed() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool is_allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_allowed;
}

// The shape of its registers: of sums (0 to 3), of x (4, 5) and of weights (6, 7), for up to 32 rows of x.
class Shape {
   public:
    ~Shape() {
        if (rows) _tile_release();
    }

    void set(long num_rows) {
        if (num_rows == rows) return;
        rows = num_rows;
        const uint8_t low = std::min<long>(rows, WIDTH), high = std::max<long>(rows - WIDTH, 1);
        struct {
            uint8_t palette = 1, start_row = 0, unused[14] = {};
            uint16_t row_bytes[16] = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE};
            uint8_t rows[16];
        } shape = {.rows = {low, low, high, high, low, high, WIDTH, WIDTH}};
        asm volatile("" ::: "memory");  // GCC does not know that all of it is read
        _tile_loadconfig(&shape);
    }

   private:
    long rows = 0;
};

template <class Product>
struct ByMatrixUnit : Product {
    static constexpr int ROWS = 2 * WIDTH;
    static constexpr bool OF_BYTES = sizeof(*Product::x) == 1;
    mutable Shape shape;

    static bool can_multiply(const Product& product) { return product.row_bytes() % LINE == 0 && is_amx_allowed(); }

    template <int tiles, bool of_next>
    void multiply_block(long num_rows, const Tiles& at) const {
        alignas(LINE) std::conditional_t<OF_BYTES, Integers, Floats> sums[ROWS][TILES];
        shape.set(num_rows);
        num_rows > WIDTH ? multiply<tiles, of_next, true>(at, sums) : multiply<tiles, of_next, false>(at, sums);
        for (long row = 0; row < num_rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) this->finish(at, row, tile, sums[row][tile]);
    }

   private:
#define MULTIPLY(sum, x, w)             \
    if constexpr (OF_BYTES)             \
        _tile_dpbsud(sum, x, w);        \
    else                                \
        _tile_dpbf16ps(sum, x, w)

    template <int tiles, bool of_next, bool is_high>
    void multiply(const Tiles& at, void* to) const {
        const long row_bytes = this->row_bytes(), tile_bytes = this->tile_bytes();
        const char *const x = (const char*)this->x + at.row * row_bytes, *const high = x + WIDTH * row_bytes;
        const char *const w = (const char*)this->w + at.output / WIDTH * tile_bytes, *const second = w + tile_bytes;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long k = 0; k < row_bytes; k += LINE) {
            UNROLL for (int tile = 0; tile < tiles; tile++)
                UNROLL for (int line = 0; line < WIDTH; line++)
                    at.fetch<of_next>(w, tile * tile_bytes + k * WIDTH + line * LINE);
            _tile_loadd(6, w + k * WIDTH, LINE);
            _tile_loadd(4, x + k, row_bytes);
            MULTIPLY(0, 4, 6);
            if constexpr (is_high) {
                _tile_loadd(5, high + k, row_bytes);
                MULTIPLY(2, 5, 6);
            }
            if constexpr (tiles == 2) {
                _tile_loadd(7, second + k * WIDTH, LINE);
                MULTIPLY(1, 4, 7);
                if constexpr (is_high) MULTIPLY(3, 5, 7);
            }
        }
        char *const low = (char*)to, *const low_second = low + LINE;
        char *const upper = low + WIDTH * TILES * LINE, *const upper_second = upper + LINE;
        _tile_stored(0, low, TILES * LINE);
        if constexpr (tiles == 2) _tile_stored(1, low_second, TILES * LINE);
        if constexpr (is_high) {
            _tile_stored(2, upper, TILES * LINE);
            if constexpr (tiles == 2) _tile_stored(3, upper_second, TILES * LINE);
        }
    }
#undef MULTIPLY
};

#endif
