// The keys or the values of one sequence and one key head, in the blocks of the paged cache.

#pragma once

#include "kernel.h"

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
        if (block_size % count == 0 && begin % count == 0 && begin + count <= end) {
            const Number* const first = (*this)[begin];
            for (int i = 0; i < count; i++) rows[i] = first + i * stride;
        } else {
            for (int i = 0; i < count; i++) rows[i] = begin + i < end ? (*this)[begin + i] : missing;
        }
    }

    // Prefetches `size` numbers of each of the rows [begin, begin + count) that are before `end`.
    template <int count>
    void prefetch(long begin, long end, long size) const {
        if (begin >= end) return;
        const Number* rows[count];
        find(begin, end, (*this)[begin], rows);
        for (const Number* row : rows)
            for (const char* line = (const char*)row; line < (const char*)(row + size); line += 64)
                _mm_prefetch(line, _MM_HINT_T0);
    }
};
