// How a product with packed weights is divided: one or two tiles of 16 outputs by up to ROWS rows at a time.

#pragma once

#include "kernel.h"

// Bytes of a tile that are fetched while one is used: half a page, since the processor by itself stops at a page's end.
constexpr long AHEAD = 2048;

inline void fetch_ahead(const void* used) {
    _mm_prefetch(static_cast<const char*>(used) + AHEAD, _MM_HINT_T0);
}

// Some rows, and one or two tiles of outputs, of which `num_outputs` exist.
struct Tiles {
    long row, output, num_outputs;

    __mmask16 kept(int tile) const { return first_of(num_outputs - tile * WIDTH); }
};

// The first `num_rows` rows, at most `rows`. Their number is compiled in, so that the sums stay in registers.
template <int tiles, int rows, class Product>
void multiply_rows(const Product& product, long num_rows, const Tiles& at) {
    if constexpr (rows > 1)
        if (num_rows < rows) return multiply_rows<tiles, rows - 1>(product, num_rows, at);
    product.template multiply<rows, tiles>(at);
}

// All M rows and N outputs; each part has outputs of its own.
template <class Product>
void multiply_all(const Product& product, long M, long N, long part, long num_parts) {
    const long step = 2 * WIDTH, num_steps = (N + step - 1) / step;
    for (long n = num_steps * part / num_parts * step; n < num_steps * (part + 1) / num_parts * step; n += step)
        for (long m = 0; m < M; m += Product::ROWS) {
            if (N - n > WIDTH)
                multiply_rows<2, Product::ROWS>(product, M - m, {m, n, N - n});
            else
                multiply_rows<1, Product::ROWS>(product, M - m, {m, n, N - n});
        }
}
