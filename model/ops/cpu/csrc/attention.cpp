// Attention of the new tokens of several sequences over keys and values in the blocks of a paged cache.
//
// q and z (N, H, D) hold the new tokens of all sequences one after the other. keys and values (slots, Hkv, D) are the
// cache of one layer. blocks (S, max_blocks) lists the blocks of each of the S sequences in order; a block has
// `block_size` slots. A token at position p sees the keys from max(0, p - window + 1) up to p.
//
// All sums are in float32 (if the CPU multiplies pairs of bfloat16, the attention weights are rounded to it first), in
// an order that depends on the position of the token alone: products of q and k over the dims of the head in order,
// weighted values over the keys of a chunk in order, then chunk by chunk. So the result has the same bits whether a
// prompt is computed at once, in chunks or token by token, and whatever other sequences are in the batch. The matrix
// unit, if there is one, has its own order, which is the same for few and for many rows.

#include "attention_scores.h"

namespace {

// Rows of a task that share packed keys and values: with more rows packing costs less, with fewer rows more threads can
// help.
constexpr long ROWS_PER_ITEM = 144;

// Several key heads are read at once, but only so many that their packed keys and values fit into the second-level cache
// and that this number of items remains.
constexpr long HEAD_DIMS_PER_ITEM = 256, MIN_ITEMS = 1;

// Sequence s has the rows of q from cu_seqlens[s] up to cu_seqlens[s + 1], the first of them at position start[s].
//
// Args: q, keys, values, z, blocks (S, max_blocks), cu_seqlens (S + 1), start (S), S, max_blocks, block_size, H, Hkv,
// D, window (or 0), scale, the strides of keys, of values and of q, softcap (or 0).
template <class Format, class Number = typename Format::Number>
void attention(Args args, long task, long num_tasks) {
    const Number *q = args.array<Number>(0), *keys = args.array<Number>(1), *values = args.array<Number>(2);
    Number* z = args.array<Number>(3);
    const int64_t *blocks = args.array<int64_t>(4), *cu_seqlens = args.array<int64_t>(5);
    const int64_t* start = args.array<int64_t>(6);
    const long num_sequences = args.integer(7), max_blocks = args.integer(8), block_size = args.integer(9);
    const long H = args.integer(10), Hkv = args.integer(11), D = args.integer(12), window = args.integer(13);
    const long q_stride = args.integer(17), group = H / Hkv;
    const long item_tokens = std::max(1L, ROWS_PER_ITEM / group);
    const auto num_new = [&](long s) { return cu_seqlens[s + 1] - cu_seqlens[s]; };
    long num_parts = 0;  // of the sequences
    for (long s = 0; s < num_sequences; s++) num_parts += (num_new(s) + item_tokens - 1) / item_tokens;
    const long head_step = std::clamp(num_parts * Hkv / MIN_ITEMS, 1L, std::clamp(HEAD_DIMS_PER_ITEM / D, 1L, Hkv));
    const long num_items = num_parts * ((Hkv + head_step - 1) / head_step);
    static thread_local Scratch scratch;
    static thread_local std::vector<Number> zeros;
    if ((long)zeros.size() < Hkv * D) zeros.resize(Hkv * D);
    long item = 0;
    for (long s = 0; s < num_sequences; s++)
        for (long end = num_new(s); end > 0; end -= item_tokens)  // the longest items first
            for (long key_head = 0; key_head < Hkv; key_head += head_step, item++) {
                if (item < num_items * task / num_tasks || item >= num_items * (task + 1) / num_tasks) continue;
                const int64_t* const own_blocks = blocks + s * max_blocks;
                const HeadsAttention<Format> heads = {
                    {keys + key_head * D, own_blocks, block_size, args.integer(15)},
                    {values + key_head * D, own_blocks, block_size, args.integer(16)},
                    q + cu_seqlens[s] * q_stride + key_head * group * D, zeros.data(),
                    z + (cu_seqlens[s] * H + key_head * group) * D,
                    q_stride, H * D, start[s], std::min(head_step, Hkv - key_head), group, D, window,
                    args.real(14), args.real(18), scratch,
                };
                heads.attend(std::max(0L, end - item_tokens) * group, end * group);
            }
}

// The scores, the masked scores and the pattern, each (H, N, S), of one sequence with N new tokens, the first of them
// at position `start`, and S keys.
//
// Args: q (N, H, D), keys (S, Hkv, D), blocks (a single 0), scores, masked scores, pattern, N, start, S, H, Hkv, D,
// window (or 0), scale, the strides of q and of keys, softcap (or 0).
template <class Format, class Number = typename Format::Number>
void attention_scores(Args args, long task, long num_tasks) {
    const Number *q = args.array<Number>(0), *keys = args.array<Number>(1);
    const long N = args.integer(6), start = args.integer(7), S = args.integer(8), H = args.integer(9);
    const long Hkv = args.integer(10), D = args.integer(11), q_stride = args.integer(14), k_stride = args.integer(15);
    constexpr long ROWS = 32;
    const long group = H / Hkv, item_tokens = std::max(1L, ROWS / group);
    const long num_items = (N + item_tokens - 1) / item_tokens;  // of one key head
    static thread_local Scratch scratch;
    static thread_local std::vector<Number> zeros;
    if ((long)zeros.size() < D) zeros.resize(D);
    for (long item = Hkv * num_items * task / num_tasks; item < Hkv * num_items * (task + 1) / num_tasks; item++) {
        const long key_head = item / num_items, begin = item % num_items * item_tokens, offset = key_head * group * N * S;
        const CacheRows<Number> rows = {keys + key_head * D, args.array<int64_t>(2), S, k_stride};
        const HeadsAttention<Format> head = {
            rows, rows, q + key_head * group * D, zeros.data(), nullptr, q_stride, 0, start, 1, group, D,
            args.integer(12), args.real(13), args.real(16), scratch,
        };
        const HeadScores<Format> outputs = {
            head, N, S, args.array<Number>(3) + offset, args.array<Number>(4) + offset,
            args.array<Number>(5) + offset,
        };
        outputs.write(begin, std::min(begin + item_tokens, N));
    }
}

bool uses_matrix_unit(long D) { return D % (2 * WIDTH) == 0 && is_amx_allowed(); }

}  // namespace

KERNEL(attention_scores_float32) { attention_scores<SingleNumbers<float>>(args, task, num_tasks); }
KERNEL(attention_float32) { attention<SingleNumbers<float>>(args, task, num_tasks); }

KERNEL(attention_scores_bfloat16) {
    uses_matrix_unit(args.integer(11)) ? attention_scores<MatrixUnitPairs>(args, task, num_tasks)
                                       : attention_scores<NumberPairs>(args, task, num_tasks);
}

KERNEL(attention_bfloat16) {
    uses_matrix_unit(args.integer(12)) ? attention<MatrixUnitPairs>(args, task, num_tasks)
                                       : attention<NumberPairs>(args, task, num_tasks);
}
