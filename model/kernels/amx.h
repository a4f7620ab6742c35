// Products by the CPU's matrix unit (Intel's AMX): of 16 rows of x, 64 bytes of each, and 16 outputs at a time. Weights
// packed for pairs of bfloat16 or for four bytes lie as it wants them.

#pragma once

#include <type_traits>

#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

constexpr long LINE = 64;  // bytes of a row

// Whether the system lets this process use the matrix unit. The tests' emulation of the unit needs no permission; it
// defines AMX_IS_EMULATED.
inline bool is_amx_allowed() {
#ifdef AMX_IS_EMULATED
    return true;
#else
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool is_allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_allowed;
#endif
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
        asm volatile("" ::"r"(&shape) : "memory");  // GCC does not know that all of it is read
        _tile_loadconfig(&shape);
    }

   private:
    long rows = 0;
};

// x by one or two tiles of weights -> sums (rows, tiles * 16) of 32 bits, `to_stride` bytes from row to row. x has 32
// rows, or (not `is_high`) 16, of `steps` times 64 bytes, `x_stride` bytes from row to row, as many as the shape says. A
// tile has 16 lines for each step, `w_line` bytes from line to line; `w_tile` bytes from tile to tile. `each` is called
// before a step with its number.
template <bool of_bytes, int tiles, bool is_high, class Each>
inline void multiply_tiles(
    const void* x, long x_stride, const void* w, long w_line, long w_tile, long steps, void* to, long to_stride,
    Each each) {
#define MULTIPLY(sum, x, w)             \
    {                                   \
        if constexpr (of_bytes)         \
            _tile_dpbsud(sum, x, w);    \
        else                            \
            _tile_dpbf16ps(sum, x, w);  \
    }

    asm volatile("" ::: "memory");  // nor that x and w are
    const char *low = (const char*)x, *high = low + WIDTH * x_stride;
    const char *first = (const char*)w, *second = first + w_tile;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < steps; step++) {
        each(step);
        _tile_loadd(6, first, w_line);
        _tile_loadd(4, low, x_stride);
        MULTIPLY(0, 4, 6)
        if constexpr (is_high) {
            _tile_loadd(5, high, x_stride);
            MULTIPLY(2, 5, 6)
        }
        if constexpr (tiles == 2) {
            _tile_loadd(7, second, w_line);
            MULTIPLY(1, 4, 7)
            if constexpr (is_high) MULTIPLY(3, 5, 7)
        }
        low += LINE, high += LINE, first += WIDTH * w_line, second += WIDTH * w_line;
    }
#undef MULTIPLY
    char *const of_low = (char*)to, *const of_high = of_low + WIDTH * to_stride;
    _tile_stored(0, of_low, to_stride);
    if constexpr (tiles == 2) _tile_stored(1, of_low + LINE, to_stride);
    if constexpr (is_high) {
        _tile_stored(2, of_high, to_stride);
        if constexpr (tiles == 2) _tile_stored(3, of_high + LINE, to_stride);
    }
}

// A product with packed weights.
template <class Product>
struct ByMatrixUnit : Product {
    static constexpr int ROWS = 2 * WIDTH;
    static constexpr bool OF_BYTES = sizeof(*Product::x) == 1;
    mutable Shape shape;

    static bool can_multiply(const Product& product) { return product.row_bytes() % LINE == 0 && is_amx_allowed(); }

    template <int tiles, bool of_next>
    void multiply_block(long num_rows, const Tiles& at) const {
        shape.set(num_rows);
        num_rows > WIDTH ? multiply<tiles, of_next, true>(num_rows, at) : multiply<tiles, of_next, false>(num_rows, at);
    }

   private:
    template <int tiles, bool of_next, bool is_high>
    void multiply(long num_rows, const Tiles& at) const {
        alignas(LINE) std::conditional_t<OF_BYTES, Integers, Floats> sums[ROWS][tiles];
        const long row_bytes = this->row_bytes(), tile_bytes = this->tile_bytes();
        const char *const x = (const char*)this->x, *const w = (const char*)this->w + at.output / WIDTH * tile_bytes;
        const auto fetch = [&](long step) {
            UNROLL for (int tile = 0; tile < tiles; tile++)
                UNROLL for (int line = 0; line < WIDTH; line++)
                    at.fetch<of_next>(w, tile * tile_bytes + (step * WIDTH + line) * LINE);
        };
        multiply_tiles<OF_BYTES, tiles, is_high>(
            x + at.row * row_bytes, row_bytes, w, LINE, tile_bytes, row_bytes / LINE, sums, tiles * LINE, fetch);
        for (long row = 0; row < num_rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) this->finish(at, row, tile, sums[row][tile]);
    }
};

#else

inline bool is_amx_allowed() { return false; }

#endif

// All rows and outputs of a product, by the matrix unit where it can be.
template <bool is_packed_for_amx, class Product>
void multiply_by_best(const Product& product, long M, long N, long part, long num_parts) {
#ifdef HAS_AMX
    if constexpr (is_packed_for_amx)
        if (ByMatrixUnit<Product>::can_multiply(product))
            return multiply_all(ByMatrixUnit<Product>{product}, M, N, part, num_parts);
#endif
    multiply_all(ByVectors<Product>{product}, M, N, part, num_parts);
}
