// Operations for traces: the largest numbers of each row, and copies of tensors that lie anywhere in memory.

#include <cmath>
#include <vector>

#include "rows.h"

namespace {

constexpr long SPAN = 16 * WIDTH;  // numbers whose maximum is kept, so that the next largest is found in one span

// A number of a row. NaN comes first, then larger values; of equal numbers, and of several NaN, the smaller index.
struct Place {
    float value;
    long index;  // -1: none

    bool equals(const Place& other) const {
        return value == other.value || (std::isnan(value) && std::isnan(other.value));
    }
    bool precedes(const Place& other) const {
        if (equals(other)) return index < other.index;
        return std::isnan(value) || value > other.value;
    }
};

// The first place of a span after `last`.
template <class Number>
Place find_next(const Number* x, long begin, long end, const Place& last) {
    Place best = {-INFINITY, -1};
    for (long i = begin; i < end; i++) {
        const Place place = {as_float(x[i]), i};
        if ((last.index < 0 || last.precedes(place)) && (best.index < 0 || place.precedes(best))) best = place;
    }
    return best;
}

// The `num_top` largest numbers of each row, the largest first, and their indices (the order is that of `Place`). There
// are at most `size` of them.
template <class Number>
STRUCT(
    TopArguments,
    (const Number*, x),  // (num_rows, size)
    (float*, values),    // (num_rows, num_top)
    (int64_t*, indices), // (num_rows, num_top)
    (long, num_rows),
    (long, size),
    (long, num_top));

template <class Number>
void top(const TopArguments<Number>& args, long task, long num_tasks) {
    const long size = args.size, count = args.num_top, num_spans = (size + SPAN - 1) / SPAN;
    std::vector<Place> best(num_spans);
    for_each_row(args.num_rows, task, num_tasks, [&](long row) {
        const Number* x = args.x + row * size;
        for (long span = 0; span < num_spans; span++) {  // the index is found when it is needed
            Floats maxima = broadcast(-INFINITY);
            Mask is_nan_lane = {};
            const Number* const from = x + span * SPAN;
            for_each_vector(std::min(SPAN, size - span * SPAN), [&](long i, Mask mask) {
                const Floats value = load(from + i, mask);
                maxima = max(select(mask, value, broadcast(-INFINITY)), maxima);  // ignores NaN
                is_nan_lane = is_nan_lane | is_nan(value);
            });
            best[span] = {count_lanes(is_nan_lane) ? NAN : reduce_max(maxima), span * SPAN};
        }
        for (long j = 0; j < count; j++) {
            long chosen = -1;
            for (long span = 0; span < num_spans; span++)
                if (best[span].index >= 0 && (chosen < 0 || best[span].precedes(best[chosen]))) chosen = span;
            const long begin = chosen * SPAN, end = std::min(begin + SPAN, size);
            // Numbers of this span that are taken already precede its best number.
            Place found = best[chosen];
            while (!found.equals({as_float(x[found.index]), found.index})) found.index++;
            args.values[row * count + j] = as_float(x[found.index]);
            args.indices[row * count + j] = found.index;
            best[chosen] = find_next(x, begin, end, found);
        }
    });
}

// A piece of memory, and its place in a copy of several. `place` and `size` are in bytes.
STRUCT(Piece, (const char*, address), (long, place), (long, size));

STRUCT(CopyPiecesArguments, (const Piece*, pieces), (char*, out), (long, num_pieces));

// Copies some pieces of memory to their places in `out`.
void copy_pieces(const CopyPiecesArguments& args, long task, long num_tasks) {
    for_each_row(args.num_pieces, task, num_tasks, [&](long index) {
        const Piece& piece = args.pieces[index];
        std::memcpy(args.out + piece.place, piece.address, piece.size);
    });
}

}  // namespace

EXPORT_DESCRIPTION(piece, Piece)
KERNEL(copy_pieces_float32, copy_pieces)
KERNEL(top_float32, top<float>)
KERNEL(top_bfloat16, top<BFloat16>)
