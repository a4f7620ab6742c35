// The keys or the values of one sequence and some key heads, in the blocks of the paged cache.

#pragma once

#include "quantized_rows.h"

constexpr long CACHE_LINE = 64;  // bytes

// `find` gives the rows of positions: `num_heads` heads of D numbers each.
//
// With `magnitudes`, the cache has bytes (quantized_rows.h), and rows are dequantized to `room`.
template <class Number>
struct CacheRows {
    const void* pool;  // from the first head on
    const int64_t* blocks;
    long block_size, stride;  // stride: from one slot to the next, in numbers
    long num_heads, D;
    const BFloat16* magnitudes = nullptr;  // from the first head on
    long magnitude_stride = 0;             // from one slot to the next
    Number* room = nullptr;                // for as many rows as are used at a time

    long number_size() const { return magnitudes ? 1 : sizeof(Number); }

    // The rows of one of the heads.
    CacheRows head(long index) const {
        CacheRows rows = *this;
        rows.pool = (const char*)pool + index * D * number_size();
        if (magnitudes) rows.magnitudes += index;
        rows.num_heads = 1;
        return rows;
    }

    // Sets `rows` to the rows of the positions [begin, begin + count). Those from `end` on are `missing`. Dequantized rows
    // are valid until their part of `room`, from row `room_row` on, is used again.
    template <int count>
    void find(long begin, long end, const Number* missing, const Number* (&rows)[count], long room_row = 0) const {
        if (magnitudes) {
            for (int i = 0; i < count; i++)
                rows[i] = begin + i < end ? dequantized(begin + i, room_row + i) : missing;
        } else if (begin % block_size + count <= block_size && begin + count <= end) {
            const Number* const first = (const Number*)bytes(begin);
            for (int i = 0; i < count; i++) rows[i] = first + i * stride;
        } else {
            for (int i = 0; i < count; i++) rows[i] = begin + i < end ? (const Number*)bytes(begin + i) : missing;
        }
    }

    // Reads the rows [begin, end), in the order in which they lie, so that they are in the CPU's cache when other code
    // reads them in another order. The memory delivers long runs several times as fast, and loads make the CPU fetch such
    // runs where prefetch instructions were no help.
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
