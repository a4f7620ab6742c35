// The loops over a matrix product y = x w^T with packed weights. linear.cpp and grouped_linear.cpp supply the product
// of one block (`multiply`): up to ROWS rows of x by one or two tiles of 16 outputs.
//
// A kernel calls multiply_all, which calls multiply_in_blocks, and for each block multiply_block of a VectorProduct (or
// an AmxProduct, amx.h), multiply, and finish for each row and tile.
//
// The weights lie tile after tile, so a block reads them in one pass through memory. Each task has some tiles to itself
// and computes all rows of x for these. No sum is divided between blocks or tasks.

#pragma once

#include "kernel.h"

constexpr int TILES_PER_BLOCK = HAS_AVX512 ? 2 : 1;

// How many bytes ahead weights are prefetched: half a page, since the hardware prefetcher stops at the end of a page.
constexpr long PREFETCH_DISTANCE = 2048;

// Rows that lie a multiple of this many bytes apart share 8 lines of the first-level cache.
constexpr long CACHE_STRIDE = 4096;

// From this number of later blocks of rows on, it does not matter how long the first block waits for memory.
constexpr long MANY_BLOCKS = 6;

// One block of the product. `num_outputs` are the outputs that exist from `output` on: the last tile may be incomplete.
struct Block {
    long row, output, num_outputs;
    long next_offset;  // where this block prefetches the next tiles: bytes from the start of this block's own tiles
    int pace_shift;    // prefetching advances 1 byte for every 2^pace_shift bytes of weights that this block uses

    Mask valid(int tile) const { return first_lanes(num_outputs - tile * WIDTH); }

    // Called when the weight at `first + offset` is used: prefetches a weight of the next tiles, or else a later one of
    // this block's tiles.
    template <bool prefetches_next, class Weight>
    void prefetch(const Weight* first, long offset) const {
        const char *const begin = (const char*)first, *const used = (const char*)(first + offset);
        __builtin_prefetch(
            prefetches_next ? begin + next_offset + ((used - begin) >> pace_shift) : used + PREFETCH_DISTANCE);
    }
};

// A product with vector instructions. The number of rows is a template argument, so that all sums stay in registers.
template <class Product>
struct VectorProduct : Product {
    // Multiplies `num_rows` rows, at most `rows`.
    template <int tiles, bool prefetches_next, int rows>
    void multiply_block(long num_rows, const Block& block) const {
        if constexpr (rows > 1 && !prefetches_next)
            if (num_rows < rows) return multiply_block<tiles, prefetches_next, rows - 1>(num_rows, block);
        this->template multiply<rows, tiles, prefetches_next>(block);
    }
};

// Multiplies all M rows by the outputs of this task, among N.
//
// For each pair of tiles, the first block of rows reads the weights from memory, and the later blocks find them in the
// cache, so memory would be idle meanwhile. With only a few later blocks, these prefetch the next tiles: 2^pace_shift
// blocks, each an equal share.
template <int ROWS, class Product>
void multiply_in_blocks(const Product& product, long M, long N, long task, long num_tasks) {
    constexpr long step = TILES_PER_BLOCK * WIDTH;
    const long num_steps = (N + step - 1) / step, size = TILES_PER_BLOCK * product.tile_bytes();
    const long num_later = M / ROWS - 1;  // complete blocks of rows after the first
    int pace_shift = 0;
    while (2 << pace_shift <= num_later) pace_shift++;
    const long num_prefetching = num_later > 0 && num_later < MANY_BLOCKS ? 1 << pace_shift : 0;
    for (long n = num_steps * task / num_tasks * step; n < num_steps * (task + 1) / num_tasks * step; n += step)
        for (long m = 0, index = 0; m < M; m += ROWS, index++) {
            const Block block = {m, n, N - n, size + ((index - 1) * size >> pace_shift), pace_shift};
            const long num_rows = std::min<long>(M - m, ROWS);
            if (N - n <= WIDTH)
                product.template multiply_block<1, false, ROWS>(num_rows, block);
            else if (index > 0 && index <= num_prefetching)
                product.template multiply_block<TILES_PER_BLOCK, true, ROWS>(num_rows, block);
            else
                product.template multiply_block<TILES_PER_BLOCK, false, ROWS>(num_rows, block);
        }
}

// The same, in blocks of as many rows as fit into the registers, or fewer where the rows share lines of the cache.
template <class Product>
void multiply_all(const Product& product, long M, long N, long task, long num_tasks) {
    constexpr int ROWS = Product::ROWS, FEWER_ROWS = Product::FEWER_ROWS;
    if constexpr (FEWER_ROWS < ROWS)
        if (M > FEWER_ROWS && product.row_bytes() % CACHE_STRIDE == 0)
            return multiply_in_blocks<FEWER_ROWS>(product, M, N, task, num_tasks);
    multiply_in_blocks<ROWS>(product, M, N, task, num_tasks);
}
