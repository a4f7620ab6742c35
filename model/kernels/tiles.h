// How a product with packed weights is divided: one or two tiles of 16 outputs by up to ROWS rows at a time.

#pragma once

#include "kernel.h"

constexpr int TILES = IS_WIDE ? 2 : 1;  // at a time

// Bytes of a tile that are fetched while one is used: half a page, since the processor by itself stops at a page's end.
constexpr long AHEAD = 2048;

// Blocks of ROWS rows beside which it no longer matters how long the first waits for memory.
constexpr long MANY_BLOCKS = 6;

// Some rows, and one or two tiles of outputs, of which `num_outputs` exist.
struct Tiles {
    long row, output, num_outputs;
    long next;   // where the weights that are fetched begin, in bytes after these tiles' own
    int slower;  // they are fetched at 1 / 2^slower of the pace at which the tiles' own are used

    Mask kept(int tile) const { return first_of(num_outputs - tile * WIDTH); }

    // While the weight `offset` after the first is used, another: of the next tiles, or of these.
    template <bool of_next, class Weight>
    void fetch(const Weight* first, long offset) const {
        const char *const from = (const char*)first, *const used = (const char*)(first + offset);
        _mm_prefetch(of_next ? from + next + ((used - from) >> slower) : used + AHEAD, _MM_HINT_T0);
    }
};

// A product whose sums stay in registers, since the number of rows is compiled in.
template <class Product>
struct ByVectors : Product {
    // The first `num_rows` rows, at most ROWS.
    template <int tiles, bool of_next, int rows = Product::ROWS>
    void multiply_block(long num_rows, const Tiles& at) const {
        if constexpr (rows > 1 && !of_next)
            if (num_rows < rows) return multiply_block<tiles, of_next, rows - 1>(num_rows, at);
        this->template multiply<rows, tiles, of_next>(at);
    }
};

// All M rows and N outputs; each part has outputs of its own. The first block of rows reads the weights of its tiles
// from memory. While a few others use them again, memory would rest: so these fetch the next tiles, each a share.
template <class Product>
void multiply_all(const Product& product, long M, long N, long part, long num_parts) {
    constexpr long ROWS = Product::ROWS, step = TILES * WIDTH;
    const long num_steps = (N + step - 1) / step, size = TILES * product.tile_bytes(), num_later = M / ROWS - 1;
    int slower = 0;
    while (2 << slower <= num_later) slower++;
    const long num_fetching = num_later > 0 && num_later < MANY_BLOCKS ? 1 << slower : 0;
    for (long n = num_steps * part / num_parts * step; n < num_steps * (part + 1) / num_parts * step; n += step)
        for (long m = 0, block = 0; m < M; m += ROWS, block++) {
            const Tiles at = {m, n, N - n, size + ((block - 1) * size >> slower), slower};
            const long num_rows = std::min(M - m, ROWS);
            if (N - n <= WIDTH)
                product.template multiply_block<1, false>(num_rows, at);
            else if (block > 0 && block <= num_fetching)
                product.template multiply_block<TILES, true>(num_rows, at);
            else
                product.template multiply_block<TILES, false>(num_rows, at);
        }
}
