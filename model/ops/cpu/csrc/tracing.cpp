// Operations for traces: the largest numbers of each row, and copies of tensors that lie anywhere in memory.

#include <cmath>
#include <vector>

#include "rows.h"

namespace {

constexpr long SPAN = 16 * WIDTH;  // numbers whose maximum is kept, so that the next largest is found in one span

float as_float(float number) { return number; }
float as_float(BFloat16 number) {
    const uint32_t bits = (uint32_t)number << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// A number of a row: a larger value comes first, then a smaller index. NaN comes with the infinite values.
struct Place {
    float value;
    long index;  // -1: none

    bool precedes(const Place& other) const {
        return value > other.value || (value == other.value && index < other.index);
    }
};

// The first place of a span after `last`.
template <class Number>
Place find_next(const Number* x, long begin, long end, const Place& last) {
    Place best = {-INFINITY, -1};
    for (long i = begin; i < end; i++) {
        const float number = as_float(x[i]);
        const Place place = {std::isnan(number) ? INFINITY : number, i};
        if ((last.index < 0 || last.precedes(place)) && (best.index < 0 || place.precedes(best))) best = place;
    }
    return best;
}

// The k largest numbers of each row, the largest first, and their indices. Of equal numbers, the one with the smaller
// index comes first. Args: x (N, size), values (N, k) float32, indices (N, k) int64, N, size, k.
template <class Number>
void top(Args args, long task, long num_tasks) {
    const long size = args.integer(4), k = args.integer(5), num_spans = (size + SPAN - 1) / SPAN;
    std::vector<Place> best(num_spans);
    for_each_row(args.integer(3), task, num_tasks, [&](long row) {
        const Number* x = args.array<Number>(0) + row * size;
        for (long span = 0; span < num_spans; span++) {  // the index is found when it is needed
            Floats maxima = broadcast(-INFINITY);
            const Number* const from = x + span * SPAN;
            for_each_vector(std::min(SPAN, size - span * SPAN), [&](long i, Mask mask) {
                const Floats value = load(from + i, mask);
                const Floats ordered = select(is_nan(value), broadcast(INFINITY), value);
                maxima = max(maxima, select(mask, ordered, broadcast(-INFINITY)));
            });
            best[span] = {reduce_max(maxima), span * SPAN};
        }
        for (long j = 0; j < k; j++) {
            long chosen = -1;
            for (long span = 0; span < num_spans; span++)
                if (best[span].index >= 0 && (chosen < 0 || best[span].precedes(best[chosen]))) chosen = span;
            const long begin = chosen * SPAN, end = std::min(begin + SPAN, size);
            // Numbers of this span that are taken already precede its best number.
            Place found = {INFINITY, -1};
            for (long i = begin; i < end && found.index < 0; i++) {
                const float number = as_float(x[i]);
                if (i >= best[chosen].index && (std::isnan(number) ? INFINITY : number) == best[chosen].value)
                    found = {best[chosen].value, i};
            }
            args.array<float>(1)[row * k + j] = as_float(x[found.index]);
            args.array<int64_t>(2)[row * k + j] = found.index;
            best[chosen] = find_next(x, begin, end, found);
        }
    });
}

}  // namespace

// Copies N pieces of memory to places in `out`. Args: the address, the place in `out` and the size of each piece (N, 3),
// out, N. Places and sizes are in bytes.
KERNEL(copy_pieces_float32) {
    struct Piece {
        const char* address;
        int64_t place, size;
    };
    for_each_row(args.integer(2), task, num_tasks, [&](long index) {
        const Piece& piece = args.array<Piece>(0)[index];
        std::memcpy(args.array<char>(1) + piece.place, piece.address, piece.size);
    });
}

KERNEL(top_float32) { top<float>(args, task, num_tasks); }
KERNEL(top_bfloat16) { top<BFloat16>(args, task, num_tasks); }
