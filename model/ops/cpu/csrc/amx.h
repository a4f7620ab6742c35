// Products with the CPU's matrix unit (Intel's AMX). One instruction multiplies up to 16 rows of x, 64 bytes of each,
// by 16 outputs. Weights that are packed in pairs of bfloat16 already have the right layout.
//
// The unit sums the even and the odd elements of bfloat16 pairs separately, so its bits differ from those of the vector
// instructions. Kernels therefore choose the unit by the CPU and by the length of a row, never by the number of rows.

#pragma once

#include "gemm.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

constexpr long LINE_BYTES = 64;  // one row of a tile register

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

// The configuration of the tile registers for up to 32 rows of x: 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights.
class TileConfig {
   public:
    ~TileConfig() {
        if (rows) _tile_release();
    }

    void set_rows(long num_rows) {
        if (num_rows == rows) return;
        rows = num_rows;
        const uint8_t lower = std::min<long>(rows, WIDTH), upper = std::max<long>(rows - WIDTH, 1);
        struct {
            uint8_t palette = 1, start_row = 0, unused[14] = {};
            uint16_t row_bytes[16] = {LINE_BYTES, LINE_BYTES, LINE_BYTES, LINE_BYTES,
                                      LINE_BYTES, LINE_BYTES, LINE_BYTES, LINE_BYTES};
            uint8_t rows[16];
        } config = {.rows = {lower, lower, upper, upper, lower, upper, WIDTH, WIDTH}};
        asm volatile("" ::"r"(&config) : "memory");  // GCC does not know that the instruction reads all of it
        _tile_loadconfig(&config);
    }

   private:
    long rows = 0;
};

// Multiplies x by one or two tiles of weights -> sums (rows, tiles * 16) in float32, in rows `to_stride` bytes apart.
//
// The TileConfig says how many rows x has: more than 16 if `has_upper_rows`. A row has `steps` times 64 bytes; rows are
// `x_stride` bytes apart. A tile has 16 lines for each step, `w_line` bytes apart; the tiles are `w_tile` bytes apart.
// `before_step` is called with the index of each step.
template <int tiles, bool has_upper_rows, class BeforeStep>
inline void multiply_tiles(
    const void* x, long x_stride, const void* w, long w_line, long w_tile, long steps, void* to, long to_stride,
    BeforeStep before_step) {
    asm volatile("" ::: "memory");  // GCC does not know either that the instructions read x and w
    const char *lower = (const char*)x, *upper = lower + WIDTH * x_stride;
    const char *first = (const char*)w, *second = first + w_tile;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < steps; step++) {
        before_step(step);
        _tile_loadd(6, first, w_line);
        _tile_loadd(4, lower, x_stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (has_upper_rows) {
            _tile_loadd(5, upper, x_stride);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (tiles == 2) {
            _tile_loadd(7, second, w_line);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (has_upper_rows) _tile_dpbf16ps(3, 5, 7);
        }
        lower += LINE_BYTES, upper += LINE_BYTES, first += WIDTH * w_line, second += WIDTH * w_line;
    }
    char *const to_lower = (char*)to, *const to_upper = to_lower + WIDTH * to_stride;
    _tile_stored(0, to_lower, to_stride);
    if constexpr (tiles == 2) _tile_stored(1, to_lower + LINE_BYTES, to_stride);
    if constexpr (has_upper_rows) {
        _tile_stored(2, to_upper, to_stride);
        if constexpr (tiles == 2) _tile_stored(3, to_upper + LINE_BYTES, to_stride);
    }
}

// A product with the matrix unit.
template <class Product>
struct AmxProduct : Product {
    static constexpr int ROWS = 2 * WIDTH, FEWER_ROWS = ROWS;
    mutable TileConfig config;

    static bool can_multiply(const Product& product) {
        return product.row_bytes() % LINE_BYTES == 0 && is_amx_allowed();
    }

    template <int tiles, bool prefetches_next, int>
    void multiply_block(long num_rows, const Block& block) const {
        config.set_rows(num_rows);
        num_rows > WIDTH ? multiply<tiles, prefetches_next, true>(num_rows, block)
                         : multiply<tiles, prefetches_next, false>(num_rows, block);
    }

   private:
    template <int tiles, bool prefetches_next, bool has_upper_rows>
    void multiply(long num_rows, const Block& block) const {
        alignas(LINE_BYTES) Floats sums[ROWS][tiles];
        const long row_bytes = this->row_bytes(), tile_bytes = this->tile_bytes();
        const char *const x = (const char*)this->x, *const w = (const char*)this->w + block.output / WIDTH * tile_bytes;
        const auto prefetch = [&](long step) {
            UNROLL for (int tile = 0; tile < tiles; tile++)
                UNROLL for (int line = 0; line < WIDTH; line++)
                    block.prefetch<prefetches_next>(w, tile * tile_bytes + (step * WIDTH + line) * LINE_BYTES);
        };
        multiply_tiles<tiles, has_upper_rows>(
            x + block.row * row_bytes, row_bytes, w, LINE_BYTES, tile_bytes, row_bytes / LINE_BYTES, sums,
            tiles * LINE_BYTES, prefetch);
        for (long row = 0; row < num_rows; row++)
            UNROLL for (int tile = 0; tile < tiles; tile++) this->finish(block, row, tile, sums[row][tile]);
    }
};

#else

inline bool is_amx_allowed() { return false; }

#endif
