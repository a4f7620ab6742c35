"""Triton kernels: norms, rotary embeddings, activations, products, and attention of one new token of each sequence.

Sums are in float32, and each result is rounded once. A program computes rows that belong to one token, in an order that
no other token changes. Triton is needed to import this module; PyTorch for CUDA includes it.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def norm_rows(
    x,
    weight,
    bias,
    out,
    row_stride,
    num_weights,
    size,
    eps,
    IS_LAYER: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize one row a program. Row r has the weights `weight[r % num_weights]`."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < size
    values = tl.load(x + row * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    if IS_LAYER:
        mean = tl.sum(values, 0) / size
        values = tl.where(inside, values - mean, 0.0)
    values = values / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    first = (row % num_weights) * size
    result = values * (tl.load(weight + first + i, mask=inside, other=0.0).to(tl.float32) + OFFSET)
    if HAS_BIAS:
        result += tl.load(bias + first + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    num_tokens,
    num_heads,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Rotate the pairs (i, i + HALF) of HEADS heads of one token a program, and copy the dims after them."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    source = x + row * token_stride + head * head_stride
    target = out + (row * num_heads + head) * SIZE
    i = tl.arange(0, BLOCK)[None, :]
    angle = (row % num_tokens) * 2 * HALF + i
    c = tl.load(cos + angle, mask=i < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=i < HALF, other=0.0).to(tl.float32)
    inside = (head < num_heads) & (i < HALF)
    first = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + i, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF + i, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if SIZE > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        is_rest = (head < num_heads) & (rest < SIZE)
        tl.store(target + rest, tl.load(source + rest, mask=is_rest), mask=is_rest)


@triton.jit
def _tanh(x):
    """tanh x = 1 - 2 / (1 + e^(2x)), which is right at both ends."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2_E * x))


@triton.jit
def activate_rows(
    pre, linear, out, pre_stride, linear_stride, size, KIND: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Apply an activation to a part of one row a program, and multiply by the gate's linear part, if there is one."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x = tl.load(pre + row * pre_stride + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        x = x / (1.0 + tl.exp2(-LOG2_E * x))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        x = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        x = tl.where(x > 0, x, tl.where(x == x, 0.0, x))
    if IS_GATED:
        x *= tl.load(linear + row * linear_stride + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _first_key(position, window):
    """The first key that a token sees. `window` is 0 if it sees all."""
    return tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)


@triton.jit
def attend_chunk(
    q,
    k,
    v,
    keys,
    values,
    blocks,
    positions,
    out,
    sums,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend from one new token to one chunk of its keys, for the query heads of one key-value head.

    The program whose chunk has the new token's own key stores it and its value in the cache. With IS_SPLIT, `out`
    (N, H, chunks, D) gets unnormalized float32 sums, and `sums` (N, H, chunks, 2) the largest score and the sum of
    weights, for `combine_chunks`; otherwise `out` is the result (N, H, D).
    """
    token, kv_head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + token).to(tl.int32)
    first_key = _first_key(position, window)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, position + 1)
    if end <= first_key or begin > position:
        return
    heads, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
    in_row = d < SIZE
    row = (kv_head * GROUP + heads)[:, None] * SIZE + d[None, :]
    in_group = (heads < GROUP)[:, None] & in_row[None, :]
    queries = tl.load(q + token * q_stride + row, mask=in_group, other=0.0)
    own_k = tl.load(k + token * k_stride + kv_head * SIZE + d, mask=in_row, other=0.0)
    own_v = tl.load(v + token * v_stride + kv_head * SIZE + d, mask=in_row, other=0.0)
    if position < begin + CHUNK:
        block = tl.load(blocks + token * table_stride + position // CACHE_BLOCK).to(tl.int64)
        slot = block * CACHE_BLOCK + position % CACHE_BLOCK
        place = (slot * NUM_KV_HEADS + kv_head) * SIZE + d
        tl.store(keys + place, own_k, mask=in_row)
        tl.store(values + place, own_v, mask=in_row)
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    weighted = tl.zeros([GROUP_BLOCK, SIZE_BLOCK], tl.float32)
    # The first tile has a key that the token sees, so `largest` is finite from then on.
    for tile in range(tl.maximum(begin, first_key // TILE * TILE), end, TILE):
        n = tile + tl.arange(0, TILE)
        visible = (n >= first_key) & (n < end)
        block = tl.load(blocks + token * table_stride + n // CACHE_BLOCK, mask=visible, other=0).to(tl.int64)
        slot = block * CACHE_BLOCK + n % CACHE_BLOCK
        place = ((slot * NUM_KV_HEADS + kv_head) * SIZE)[:, None] + d[None, :]
        is_own = (n == position)[:, None]
        is_stored = (visible & (n != position))[:, None] & in_row[None, :]
        tile_k = tl.where(is_own, own_k[None, :], tl.load(keys + place, mask=is_stored, other=0.0))
        scores = tl.dot(queries, tl.trans(tile_k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2((scores - new_largest[:, None]) * LOG2_E)
        shrink = tl.exp2((largest - new_largest) * LOG2_E)
        tile_v = tl.where(is_own, own_v[None, :], tl.load(values + place, mask=is_stored, other=0.0))
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(tile_v.dtype), tile_v, input_precision="ieee")
        largest = new_largest
    if IS_SPLIT:
        num_chunks = tl.num_programs(2)
        part = (token * NUM_KV_HEADS * GROUP + kv_head * GROUP + heads) * num_chunks + chunk
        tl.store(out + part[:, None] * SIZE + d[None, :], weighted, mask=in_group)
        tl.store(sums + part * 2, largest, mask=heads < GROUP)
        tl.store(sums + part * 2 + 1, total, mask=heads < GROUP)
    else:
        result = weighted / total[:, None]
        tl.store(out + token * NUM_KV_HEADS * GROUP * SIZE + row, result.to(out.dtype.element_ty), mask=in_group)


@triton.jit
def combine_chunks(
    parts,
    sums,
    positions,
    out,
    num_chunks,
    window,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    """Combine the chunks of one head of one token, in order."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token).to(tl.int32)
    d = tl.arange(0, SIZE_BLOCK)
    in_row = d < SIZE
    first = (token * tl.num_programs(1) + head) * num_chunks
    largest = float("-inf")
    total = 0.0
    weighted = tl.zeros([SIZE_BLOCK], tl.float32)
    for chunk in range(_first_key(position, window) // CHUNK, position // CHUNK + 1):
        own_largest = tl.load(sums + (first + chunk) * 2)
        new_largest = tl.maximum(largest, own_largest)
        shrink = tl.exp2((largest - new_largest) * LOG2_E)
        weight = tl.exp2((own_largest - new_largest) * LOG2_E)
        total = total * shrink + tl.load(sums + (first + chunk) * 2 + 1) * weight
        own = tl.load(parts + (first + chunk) * SIZE + d, mask=in_row, other=0.0)
        weighted = weighted * shrink + own * weight
        largest = new_largest
    out_row = out + (token * tl.num_programs(1) + head) * SIZE
    tl.store(out_row + d, (weighted / total).to(out.dtype.element_ty), mask=in_row)


@triton.jit
def score_keys(
    q,
    keys,
    blocks,
    position_of,
    scores,
    masked,
    pattern,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Write the scores, masked scores and pattern of one head of one new token: a number for each of its keys.

    `attend_chunk` has stored the keys.
    """
    head = tl.program_id(0)
    position = tl.load(position_of).to(tl.int32)
    first_key = _first_key(position, window)
    d = tl.arange(0, SIZE_BLOCK)
    in_row = d < SIZE
    query = tl.load(q + head * SIZE + d, mask=in_row, other=0.0).to(tl.float32)
    row = head.to(tl.int64) * (position + 1)
    largest = float("-inf")
    total = 0.0
    for tile in range(0, position + 1, TILE):
        n = tile + tl.arange(0, TILE)
        block = tl.load(blocks + n // CACHE_BLOCK, mask=n <= position, other=0).to(tl.int64)
        slot = block * CACHE_BLOCK + n % CACHE_BLOCK
        place = ((slot * NUM_KV_HEADS + head // GROUP) * SIZE)[:, None] + d[None, :]
        is_stored = (n <= position)[:, None] & in_row[None, :]
        tile_k = tl.load(keys + place, mask=is_stored, other=0.0).to(tl.float32)
        score = tl.sum(tile_k * query[None, :], 1) * scale
        if HAS_SOFTCAP:
            score = softcap * _tanh(score / softcap)
        score = score.to(scores.dtype.element_ty)
        tl.store(scores + row + n, score, mask=n <= position)
        visible = (n >= first_key) & (n <= position)
        hidden = tl.where(visible, score.to(tl.float32), float("-inf"))
        tl.store(masked + row + n, hidden.to(scores.dtype.element_ty), mask=n <= position)
        new_largest = tl.maximum(largest, tl.max(hidden, 0))
        if new_largest > float("-inf"):
            total = total * tl.exp2((largest - new_largest) * LOG2_E)
            total += tl.sum(tl.exp2((hidden - new_largest) * LOG2_E), 0)
        largest = new_largest
    tl.debug_barrier()  # other threads have written what this one reads now
    for tile in range(0, position + 1, TILE):
        n = tile + tl.arange(0, TILE)
        hidden = tl.load(masked + row + n, mask=n <= position, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((hidden - largest) * LOG2_E) / total
        tl.store(pattern + row + n, weight.to(pattern.dtype.element_ty), mask=n <= position)


@triton.jit
def summarize_tensors(table, out, like, BLOCK: tl.constexpr):
    """Write six float64 statistics of one tensor a program, as `SummaryCalls` describes them.

    `table` (n, 2) int64 has the address and the number of elements of each tensor; `like` has their dtype.
    """
    index = tl.program_id(0)
    x = tl.load(table + 2 * index).to(tl.pointer_type(like.dtype.element_ty))
    count = tl.load(table + 2 * index + 1)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    num_finite = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < count, other=float("inf")).to(tl.float32)
        is_finite = tl.abs(values) < float("inf")
        low = tl.minimum(low, tl.where(is_finite, values, float("inf")))
        high = tl.maximum(high, tl.where(is_finite, values, float("-inf")))
        total += tl.where(is_finite, values, 0.0)
        num_finite += is_finite.to(tl.int64)
    found = tl.sum(num_finite, 0)
    size = tl.maximum(found, 1).to(tl.float64)
    mean = tl.sum(total.to(tl.float64), 0) / size
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < count, other=float("inf")).to(tl.float32)
        deviation = tl.where(tl.abs(values) < float("inf"), values - mean.to(tl.float32), 0.0)
        squares += deviation * deviation
    square = tl.sum(squares.to(tl.float64), 0)
    row = out + 6 * index
    tl.store(row, tl.min(low, 0).to(tl.float64))
    tl.store(row + 1, tl.max(high, 0).to(tl.float64))
    tl.store(row + 2, mean)
    tl.store(row + 3, tl.sqrt(square / size))
    tl.store(row + 4, tl.sqrt(square + mean * mean * size))
    tl.store(row + 5, (count - found).to(tl.float64))


@triton.jit
def copy_tensors(table, out, BLOCK: tl.constexpr):
    """Copy a part of one tensor a program to its place in `out`.

    `table` (n, 3) int64 has the address, the place and the size of each tensor, in bytes, which are even.
    """
    index = tl.program_id(0)
    source = tl.load(table + 3 * index).to(tl.pointer_type(tl.int16))
    place, size = tl.load(table + 3 * index + 1) // 2, tl.load(table + 3 * index + 2) // 2
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place + i, tl.load(source + i, mask=i < size), mask=i < size)


@triton.jit
def multiply_rows(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """x @ weight.T + bias for ROWS rows and OUTPUTS outputs a program. All sums are in the same order."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = (m < num_rows)[:, None], (n < num_outputs)[:, None]
    x_row = x + m.to(tl.int64)[:, None] * row_stride
    weight_row = weight + n.to(tl.int64)[:, None] * num_inputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, num_inputs, INPUTS):
        k = (begin + tl.arange(0, INPUTS))[None, :]
        inside = k < num_inputs
        part = tl.load(x_row + k, mask=is_row & inside, other=0.0)
        weights = tl.load(weight_row + k, mask=is_output & inside, other=0.0)
        total = tl.dot(part, tl.trans(weights), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * num_outputs + n[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_row & (n < num_outputs)[None, :])


@triton.jit
def multiply_row(
    x,
    weight,
    bias,
    out,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """x @ weight.T + bias for a single row x, and OUTPUTS outputs a program."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = n < num_outputs
    weight_row = weight + n.to(tl.int64)[:, None] * num_inputs
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for begin in range(0, num_inputs, INPUTS):
        k = begin + tl.arange(0, INPUTS)
        inside = k < num_inputs
        part = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(weight_row + k[None, :], mask=is_output[:, None] & inside[None, :], other=0.0)
        total += weights.to(tl.float32) * part[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def find_largest(values, indices, largest, places, size, HAS_INDICES: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest of BLOCK numbers of one row a program, and where it is first. NaN is larger than all numbers.

    `indices` are those of the numbers in the whole row, with HAS_INDICES; otherwise the numbers are the whole row.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    found = tl.load(values + row * size + i, mask=inside, other=float("-inf")).to(tl.float32)
    place = i
    if HAS_INDICES:
        place = tl.load(indices + row * size + i, mask=inside, other=0).to(tl.int32)
    is_nan = found != found
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    most = tl.max(tl.where(is_nan, float("-inf"), found), 0)
    is_largest = inside & tl.where(has_nan, is_nan, found == most)
    out = row * tl.num_programs(1) + part
    tl.store(largest + out, tl.where(has_nan, float("nan"), most).to(largest.dtype.element_ty))
    tl.store(places + out, tl.min(tl.where(is_largest, place, 2147483647), 0).to(places.dtype.element_ty))
