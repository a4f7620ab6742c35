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

// Rows of an item of work that share packed keys and values: with more rows packing costs less, with fewer rows more
// threads can help.
constexpr long ROWS_PER_ITEM = 144;

// Several key heads are read at once, but only so many that a number of items remains, and that the packed keys and
// values of several tokens fit into the second-level cache. Reading takes most of the time for single tokens only.
constexpr long MIN_ITEMS = 6, MIN_PACKED_ITEMS = 32, HEAD_DIMS_PER_ITEM = 256;

// The sums of a row over a chunk in memory: `values` (D), then the RowSums.
constexpr long PARTIAL_PADDING = WIDTH;

// Sequence s has the rows of q from cu_seqlens[s] up to cu_seqlens[s + 1], the first of them at position start[s].
//
// cu_seqlens has S + 1 numbers, `start` has S. With `partials`, each chunk of keys is an item of its own, and if a
// sequence has several chunks, `attention_combine` must be called next: it writes z of this sequence.
template <class Number>
STRUCT(
    AttentionArguments,
    (const Number*, q),
    (const Number*, keys),
    (const Number*, values),
    (Number*, z),
    (const int64_t*, blocks),  // (S, max_blocks)
    (const int64_t*, cu_seqlens),
    (const int64_t*, start),
    (float*, partials),  // or null: (N, H, max_chunks, D + PARTIAL_PADDING)
    (const BFloat16*, key_magnitudes),    // or null: (slots, Hkv) of keys in 8 bits (quantized_rows.h)
    (const BFloat16*, value_magnitudes),  // likewise
    (long, num_sequences),
    (long, max_blocks),
    (long, block_size),
    (long, max_chunks),
    (long, H),
    (long, Hkv),
    (long, D),
    (long, window),  // or 0
    (long, q_stride),
    (long, k_stride),
    (long, v_stride),
    (double, scale),
    (double, softcap));  // or 0

// The items of a call: for each sequence, its tokens in parts, its key heads in groups, and the chunks of keys one by one
// if there are partials.
template <class Format>
struct Items {
    using Number = typename Format::Number;
    const AttentionArguments<Number>& args;
    long group = args.H / args.Hkv, item_tokens = std::max(1L, ROWS_PER_ITEM / group);

    long num_new(long s) const { return args.cu_seqlens[s + 1] - args.cu_seqlens[s]; }

    // Where the chunks of a sequence begin and end. Without partials, all of them are one item.
    long first_chunk(long s) const {
        return round_down(args.window ? std::max(0L, (long)args.start[s] - args.window + 1) : 0, KEYS_PER_CHUNK);
    }
    long end(long s) const { return args.start[s] + num_new(s); }
    bool is_split(long s) const { return args.partials && end(s) - first_chunk(s) > KEYS_PER_CHUNK; }

    // Calls visit(sequence, first token, end token, first key head, key heads, chunk) for the items of one task.
    template <class Visit>
    void visit(long task, long num_tasks, Visit visit_item) const {
        long num_parts = 0, longest = 0;
        for_each_part([&](long s, long, long, long) { num_parts++, longest = std::max(longest, num_new(s)); });
        const bool is_packed = Format::USES_AMX || longest > 1;
        const long max_heads = is_packed ? std::clamp(HEAD_DIMS_PER_ITEM / args.D, 1L, args.Hkv) : args.Hkv;
        const long min_items = is_packed ? MIN_PACKED_ITEMS : MIN_ITEMS;
        const long heads = std::clamp(num_parts * args.Hkv / min_items, 1L, max_heads);
        const long num_items = num_parts * ((args.Hkv + heads - 1) / heads);
        const long begin = num_items * task / num_tasks, end = num_items * (task + 1) / num_tasks;
        long item = 0;
        for_each_part([&](long s, long first_token, long end_token, long chunk) {
            for (long head = 0; head < args.Hkv; head += heads, item++)
                if (item >= begin && item < end)
                    visit_item(s, first_token, end_token, head, std::min(heads, args.Hkv - head), chunk);
        });
    }

   private:
    template <class Visit>
    void for_each_part(Visit visit_part) const {
        for (long s = 0; s < args.num_sequences; s++) {
            const long chunk_step = is_split(s) ? KEYS_PER_CHUNK : std::numeric_limits<long>::max() / 2;
            for (long end_token = num_new(s); end_token > 0; end_token -= item_tokens)  // the longest items first
                for (long chunk = first_chunk(s); chunk < end(s); chunk += chunk_step)
                    visit_part(s, std::max(0L, end_token - item_tokens), end_token, chunk);
        }
    }
};

// The keys or the values of some heads, where `args` says. Rows in 8 bits are dequantized to memory of the thread.
template <class Arguments, class Number>
CacheRows<Number> rows_of(
    const Arguments& args, const Number* pool, const BFloat16* magnitudes, long stride, const int64_t* blocks,
    long end, long first_head, long num_heads) {
    static thread_local std::vector<Number> room;
    if (magnitudes && (long)room.size() < WIDTH * num_heads * args.D) room.resize(WIDTH * num_heads * args.D);
    const CacheRows<Number> rows = {
        pool, blocks, args.block_size, stride, num_heads, args.D, end, magnitudes, args.Hkv, room.data()};
    CacheRows<Number> own = rows.head(first_head);
    own.num_heads = num_heads;
    return own;
}

template <class Format, class Number = typename Format::Number>
void attention(const AttentionArguments<Number>& args, long task, long num_tasks) {
    static thread_local Scratch scratch;
    static thread_local std::vector<Number> zeros;
    if ((long)zeros.size() < args.Hkv * args.D) zeros.resize(args.Hkv * args.D);
    const Items<Format> items = {args};
    const long H = args.H, D = args.D, group = items.group;
    items.visit(task, num_tasks, [&](long s, long token, long end_token, long key_head, long num_heads, long chunk) {
        const int64_t* const blocks = args.blocks + s * args.max_blocks;
        const long row = args.cu_seqlens[s], head = key_head * group;
        const HeadsAttention<Format> heads = {
            rows_of(args, args.keys, args.key_magnitudes, args.k_stride, blocks, items.end(s), key_head, num_heads),
            rows_of(args, args.values, args.value_magnitudes, args.v_stride, blocks, items.end(s), key_head, num_heads),
            args.q + row * args.q_stride + head * D, zeros.data(), args.z + (row * H + head) * D, args.q_stride, H * D,
            args.start[s], num_heads, group, D, args.window, (float)args.scale, (float)args.softcap, scratch,
        };
        if (!items.is_split(s)) return heads.attend(token * group, end_token * group);
        if (chunk >= heads.end_visible(end_token * group - 1) || chunk + KEYS_PER_CHUNK <= heads.first_visible(token * group))
            return;
        const long chunk_index = (chunk - items.first_chunk(s)) / KEYS_PER_CHUNK, size = D + PARTIAL_PADDING;
        heads.attend_chunk(
            token * group, end_token * group, chunk,
            [&](long item_head, long item_row, const RowSums& sums, const float* values) {
                const long partial_row = (row + item_row / group) * H + head + item_head * group + item_row % group;
                float* const partial = args.partials + (partial_row * args.max_chunks + chunk_index) * size;
                std::copy(values, values + D, partial);
                *(RowSums*)(partial + D) = sums;
            });
    });
}

// Combines the sums over the chunks, in order, to z.
template <class Format, class Number = typename Format::Number>
void attention_combine(const AttentionArguments<Number>& args, long task, long num_tasks) {
    static thread_local Scratch scratch;
    const Items<Format> items = {args};
    const long H = args.H, D = args.D, size = D + PARTIAL_PADDING;
    float* const totals = scratch.reserve(D);
    for (long s = 0; s < args.num_sequences; s++) {
        if (!items.is_split(s)) continue;
        const long num_rows = items.num_new(s) * H, first_row = args.cu_seqlens[s] * H;
        for (long i = num_rows * task / num_tasks; i < num_rows * (task + 1) / num_tasks; i++) {
            const long position = args.start[s] + i / H;
            const long first = args.window ? std::max(0L, position - args.window + 1) : 0;
            const float* const partials = args.partials + (first_row + i) * args.max_chunks * size;
            RowSums sums;
            std::fill(totals, totals + D, 0.0f);
            for (long chunk = round_down(first, KEYS_PER_CHUNK); chunk <= position; chunk += KEYS_PER_CHUNK) {
                const float* const partial = partials + (chunk - items.first_chunk(s)) / KEYS_PER_CHUNK * size;
                combine<Format>(sums, totals, *(const RowSums*)(partial + D), partial, D);
            }
            Number* const to = args.z + (first_row + i) * D;
            for (long d = 0; d < D; d += WIDTH) store(to + d, load(totals + d) / broadcast(sums.total));
        }
    }
}

// The scores, the masked scores and the pattern, each (H, N, S), of one sequence with N new tokens, the first of them
// at position start[0], and S = start[0] + N keys. A recorded call reads `start` and `blocks` when it is replayed.
template <class Number>
STRUCT(
    AttentionScoresArguments,
    (const Number*, q),     // (N, H, D)
    (const Number*, keys),  // (slots, Hkv, D)
    (const int64_t*, blocks),
    (const int64_t*, start),             // (1)
    (const BFloat16*, key_magnitudes),  // or null, as in AttentionArguments
    (Number*, scores),
    (Number*, masked),
    (Number*, pattern),
    (long, N),
    (long, block_size),
    (long, H),
    (long, Hkv),
    (long, D),
    (long, window),  // or 0
    (long, q_stride),
    (long, k_stride),
    (double, scale),
    (double, softcap));  // or 0

template <class Format, class Number = typename Format::Number>
void attention_scores(const AttentionScoresArguments<Number>& args, long task, long num_tasks) {
    // A thread keeps the memory for the scores of one item, so items of many keys have fewer rows.
    constexpr long MAX_ROWS = 32, MAX_SCORES = 1 << 18;
    const long N = args.N, start = *args.start, S = start + N, D = args.D, group = args.H / args.Hkv;
    const long item_tokens = std::max(1L, std::min(MAX_ROWS, MAX_SCORES / S) / group);
    const long num_parts = (N + item_tokens - 1) / item_tokens, num_items = args.Hkv * num_parts;
    static thread_local Scratch scratch;
    static thread_local std::vector<Number> zeros;
    if ((long)zeros.size() < D) zeros.resize(D);
    for (long item = num_items * task / num_tasks; item < num_items * (task + 1) / num_tasks; item++) {
        const long key_head = item / num_parts, token = item % num_parts * item_tokens;
        const CacheRows<Number> rows =
            rows_of(args, args.keys, args.key_magnitudes, args.k_stride, args.blocks, S, key_head, 1);
        const HeadsAttention<Format> head = {
            rows, rows, args.q + key_head * group * D, zeros.data(), nullptr, args.q_stride, 0, start, 1, group, D,
            args.window, (float)args.scale, (float)args.softcap, scratch,
        };
        const long offset = key_head * group * N * S;
        const HeadScores<Format> outputs = {
            head, N, S, args.scores + offset, args.masked + offset, args.pattern + offset};
        outputs.write(token, std::min(token + item_tokens, N));
    }
}

bool uses_matrix_unit(long D) { return D % (2 * WIDTH) == 0 && is_amx_allowed(); }

void attention_bfloat16_by_best_unit(const AttentionArguments<BFloat16>& args, long task, long num_tasks) {
    uses_matrix_unit(args.D) ? attention<MatrixUnitPairs>(args, task, num_tasks)
                             : attention<NumberPairs>(args, task, num_tasks);
}

void attention_scores_bfloat16_by_best_unit(
    const AttentionScoresArguments<BFloat16>& args, long task, long num_tasks) {
    uses_matrix_unit(args.D) ? attention_scores<MatrixUnitPairs>(args, task, num_tasks)
                             : attention_scores<NumberPairs>(args, task, num_tasks);
}

}  // namespace

EXPORT_CONSTANT(WIDTH)
EXPORT_CONSTANT(KEYS_PER_CHUNK)
EXPORT_CONSTANT(PARTIAL_PADDING)

KERNEL(write_quantized_float32, write_quantized<float>)
KERNEL(write_quantized_bfloat16, write_quantized<BFloat16>)
KERNEL(attention_float32, attention<SingleNumbers<float>>)
KERNEL(attention_bfloat16, attention_bfloat16_by_best_unit)
KERNEL(attention_combine_float32, attention_combine<SingleNumbers<float>>)
KERNEL(attention_combine_bfloat16, attention_combine<NumberPairs>)
KERNEL(attention_scores_float32, attention_scores<SingleNumbers<float>>)
KERNEL(attention_scores_bfloat16, attention_scores_bfloat16_by_best_unit)
