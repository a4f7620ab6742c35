// The keys or the values of one sequence and one key head, in the blocks of the paged cache.

#pragma once

#include "kernel.h"

constexpr long CACHE_LINE = 64;  // bytes

// `rows[i]` is the row of the token at position i.
template <class Number>
struct CacheRows {
    const Number* pool;
    const int64_t* blocks;
    long block_size, stride;  // stride: from one slot to the next, in numbers

    const Number* operator[](long position) const {
        return pool + (blocks[position / block_size] * block_size + position % block_size) * stride;
    }

    // Sets `rows` to the rows of the positions [begin, begin + count). Those from `end` on are `missing`.
    template <int count>
    void find(long begin, long end, const Number* missing, const Number* (&rows)[count]) const {
        if (begin % block_size + count <= block_size && begin + count <= end) {
            const Number* const first = (*this)[begin];
            for (int i = 0; i < count; i++) rows[i] = first + i * stride;
        } else {
            for (int i = 0; i < count; i++) rows[i] = begin + i < end ? (*this)[begin + i] : missing;
        }
    }

    // Reads `size` numbers of each of the rows [begin, end), in the order in which they lie, so that they are in the CPU's
    // cache when other code reads them in another order. The memory delivers long runs several times as fast, and
    // loads make the CPU fetch such runs where prefetch instructions were no help.
    void touch(long begin, long end, long size) const {
        while (begin < end) {
            const long next = std::min(end, (begin / block_size + 1) * block_size);
            const char* row = (const char*)(*this)[begin];
            for (; begin < next; begin++, row += stride * sizeof(Number))
                for (long byte = 0; byte < size * (long)sizeof(Number); byte += CACHE_LINE)
                    (void)*(const volatile char*)(row + byte);
        }
    }
};
