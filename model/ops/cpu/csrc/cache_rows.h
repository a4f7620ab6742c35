// The keys or the values of one sequence and some key heads, in the blocks of the paged cache.

#pragma once

#include "quantized_rows.h"

constexpr long CACHE_LINE = 64;        // bytes
constexpr long AHEAD_BYTES = 4 << 10;  // from what is read to what is prefetched

// Computing over numbers of 16 bits takes about as long as reading them, so they are prefetched while other rows are
// used. Of numbers of 32 bits, reading takes most of the time: they are read in the order in which they lie (`touch`).
template <class Number>
constexpr bool IS_PREFETCHED = sizeof(Number) < 4;

// A head of WIDTH rows that are read soon. Prefetch it a few lines at a time, between other instructions: many prefetches
// at once stop all loads.
template <class Number>
struct Ahead {
    const char* first;
    long row_bytes;  // from row to row

    // Begins to read a line of a row into the first-level cache alone.
    void prefetch(long row, long byte) const {
        if constexpr (IS_PREFETCHED<Number>) __builtin_prefetch(first + row * row_bytes + byte, 0, 0);
    }
};

// `find` gives the rows of positions: `num_heads` heads of D numbers each.
//
// With `magnitudes`, the cache has bytes (quantized_rows.h), and rows are dequantized to `room`.
template <class Number>
struct CacheRows {
    const void* pool;  // from the first head on
    const int64_t* blocks;
    long block_size, stride;  // stride: from one slot to the next, in numbers
    long num_heads, D;
    long end;  // of the sequence: positions from here on have no blocks
    const BFloat16* magnitudes = nullptr;  // from the first head on
    long magnitude_stride = 0;             // from one slot to the next
    Number* room = nullptr;                // for WIDTH rows

    long number_size() const { return magnitudes ? 1 : sizeof(Number); }
    long row_bytes() const { return stride * number_size(); }

    // The rows of one of the heads.
    CacheRows head(long index) const {
        CacheRows rows = *this;
        rows.pool = (const char*)pool + index * D * number_size();
        if (magnitudes) rows.magnitudes += index;
        rows.num_heads = 1;
        return rows;
    }

    // Sets `rows` to the rows of the WIDTH positions from `begin` on. Those from `end` on are `missing`. Dequantized rows
    // are valid until `room` is used again.
    void find(long begin, long end, const Number* missing, const Number* (&rows)[WIDTH]) const {
        if (magnitudes) {
            for (int i = 0; i < WIDTH; i++)
                rows[i] = begin + i < end ? dequantized(begin + i, i) : missing;
        } else if (is_run(begin, end)) {
            const Number* const first = (const Number*)bytes(begin);
            for (int i = 0; i < WIDTH; i++) rows[i] = first + i * stride;
        } else {
            for (int i = 0; i < WIDTH; i++) rows[i] = begin + i < end ? (const Number*)bytes(begin + i) : missing;
        }
    }

    // What is read AHEAD_BYTES after a head of the WIDTH rows from `position` on, if all heads of some rows are read, then
    // those of the next rows.
    Ahead<Number> ahead(long position, long head) const {
        const long next = head + std::max(1L, AHEAD_BYTES / (WIDTH * D * number_size()));
        position += next / num_heads * WIDTH;
        if (!is_run(position, end)) return {(const char*)blocks, 0};
        return {bytes(position) + next % num_heads * D * number_size(), row_bytes()};
    }

    // Reads the rows [begin, end), in the order in which they lie, so that they are in the CPU's cache when other code
    // reads them in another order. The memory delivers long runs several times as fast.
    void touch(long begin, long end) const {
        while (begin < end) {
            const long next = std::min(end, (begin / block_size + 1) * block_size);
            const char* row = bytes(begin);
            for (; begin < next; begin++, row += stride * number_size())
                for (long byte = 0; byte < num_heads * D * number_size(); byte += CACHE_LINE)
                    (void)*(const volatile char*)(row + byte);
        }
    }

   private:
    // Whether the WIDTH rows from `begin` on lie one after the other, before `end`.
    bool is_run(long begin, long end) const {
        return begin % block_size + WIDTH <= block_size && begin + WIDTH <= end;
    }

    long slot(long position) const { return blocks[position / block_size] * block_size + position % block_size; }
    const char* bytes(long position) const { return (const char*)pool + slot(position) * stride * number_size(); }

    const Number* dequantized(long position, long room_row) const {
        Number* const row = room + room_row * num_heads * D;
        const int8_t* const integers = (const int8_t*)bytes(position);
        const BFloat16* const own = magnitudes + slot(position) * magnitude_stride;
        for (long head = 0; head < num_heads; head++)
            dequantize_row(integers + head * D, own[head], row + head * D, D);
        return row;
    }
};
