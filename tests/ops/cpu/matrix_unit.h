// Emulates Intel's matrix unit (AMX) on a CPU that has AVX-512 but no AMX, so that the kernels' AMX code is tested there
// too. As in the real unit, the products of the even and of the odd bfloat16 numbers are summed separately.
//
// Only the intrinsics are replaced, and the request for permission to use the unit is skipped (AMX_IS_EMULATED). System
// calls stay as they are: the standard library puts waiting threads to sleep with one.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

struct MatrixUnit {
    struct {
        uint8_t palette, start_row, unused[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config;
    alignas(64) char tiles[8][16][64];

    void load(int tile, const void* from, long stride) {
        memset(tiles[tile], 0, sizeof tiles[tile]);
        for (int row = 0; row < config.rows[tile]; row++)
            memcpy(tiles[tile][row], (const char*)from + row * stride, config.row_bytes[tile]);
    }

    void store(int tile, void* to, long stride) {
        for (int row = 0; row < config.rows[tile]; row++)
            memcpy((char*)to + row * stride, tiles[tile][row], config.row_bytes[tile]);
    }

    // The four bytes at a column of 32 bits.
    int four_bytes(int tile, int row, int column) {
        int bytes;
        memcpy(&bytes, tiles[tile][row] + 4 * column, sizeof bytes);
        return bytes;
    }

    void multiply_pairs(int sum, int x, int w) {
        const __m512i upper = _mm512_set1_epi32(0xffff0000);
        for (int row = 0; row < config.rows[sum]; row++) {
            __m512 even = _mm512_setzero_ps(), odd = even;
            for (int k = 0; k < config.row_bytes[x] / 4; k++) {
                const __m512i a = _mm512_set1_epi32(four_bytes(x, row, k)), b = _mm512_loadu_si512(tiles[w][k]);
                even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), even);
                odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, upper), (__m512)_mm512_and_si512(b, upper), odd);
            }
            float* const to = (float*)tiles[sum][row];
            _mm512_storeu_ps(to, _mm512_loadu_ps(to) + (even + odd));
        }
    }
};

static thread_local MatrixUnit matrix_unit;

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) memcpy(&matrix_unit.config, from, 64)
#define _tile_release() memset(&matrix_unit.config, 0, 64)
#define _tile_loadd(tile, from, stride) matrix_unit.load(tile, from, stride)
#define _tile_stored(tile, to, stride) matrix_unit.store(tile, to, stride)
#define _tile_zero(tile) memset(matrix_unit.tiles[tile], 0, 1024)
#define _tile_dpbf16ps(sum, x, w) matrix_unit.multiply_pairs(sum, x, w)
#define AMX_IS_EMULATED
#ifndef __AMX_TILE__
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#endif
