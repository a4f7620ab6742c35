"""The arguments of the kernels, and other structs and constants that the C++ code in `csrc` declares, too.

Fields and constants have the same names on both sides, and fields the same order. `shared_layout.py` compares both
sides when a library is loaded. The C++ declarations say what the fields mean. An address is 0 where C++ allows null.
"""

from typing import Annotated, NamedTuple

from model.ops.row_edits import RuleKind
from model.ops.weight_formats import GROUP, SUPERGROUP

Address = Annotated[int, "address"]

VECTOR_WIDTH = 16  # lanes of a vector, and outputs of a tile of packed weights
FLOAT32_DEPTH, BFLOAT16_DEPTH = 1, 2  # inputs of one output that lie side by side in a packed weight
KEYS_PER_CHUNK = 256  # keys whose softmax and weighted values are summed before they are added to those of other keys
PARTIAL_PADDING = 16  # numbers behind the weighted values of a chunk: its softmax
SUMMARY_CHUNK = 1 << 14  # numbers that are summarized at a time
INPUT_GROUP_BYTES = 44  # of a group of 32 rounded inputs
NUM_MOMENTS = 5  # float64 numbers of the moments of a chunk
EDIT_KINDS: tuple[RuleKind, ...] = ("set", "add", "scale", "cap", "project", "cap_component")

CONSTANTS: dict[str, dict[str, int]] = {
    "attention": {"WIDTH": VECTOR_WIDTH, "KEYS_PER_CHUNK": KEYS_PER_CHUNK, "PARTIAL_PADDING": PARTIAL_PADDING},
    "edits": {kind.upper(): index for index, kind in enumerate(EDIT_KINDS)},
    "grouped_linear": {
        "WIDTH": VECTOR_WIDTH,
        "GROUP": GROUP,
        "SUPERGROUP": SUPERGROUP,
        "INPUT_GROUP_BYTES": INPUT_GROUP_BYTES,
    },
    "linear": {"WIDTH": VECTOR_WIDTH, "FLOAT32_DEPTH": FLOAT32_DEPTH, "BFLOAT16_DEPTH": BFLOAT16_DEPTH},
    "pack": {"WIDTH": VECTOR_WIDTH, "GROUP": GROUP},
    "statistics": {"SUMMARY_CHUNK": SUMMARY_CHUNK, "NUM_MOMENTS": NUM_MOMENTS},
}


# thread_pool.cpp


class KernelCall(NamedTuple):
    kernel: Address
    num_tasks: int
    arguments: Address


# elementwise.cpp


class TakeRowsArguments(NamedTuple):
    table: Address
    indices: Address
    out: Address
    num_rows: int
    size: int


class WriteRowsArguments(NamedTuple):
    k: Address
    v: Address
    keys: Address
    values: Address
    slots: Address
    num_rows: int
    size: int
    k_stride: int
    v_stride: int


class AddArguments(NamedTuple):
    a: Address
    b: Address
    out: Address
    num_elements: int


class MapArguments(NamedTuple):
    x: Address
    out: Address
    num_elements: int
    parameter: float


class NormArguments(NamedTuple):
    x: Address
    weight: Address
    bias: Address
    out: Address
    scales: Address
    normalized: Address
    outer: int
    inner: int
    size: int
    outer_stride: int
    inner_stride: int
    weight_stride: int
    is_centered: int
    eps: float
    offset: float


class RotationArguments(NamedTuple):
    positions: Address
    frequencies: Address
    cosines: Address
    sines: Address
    num_rows: int
    half: int
    factor: float


class SelectRotationArguments(NamedTuple):
    short_cosines: Address
    short_sines: Address
    long_cosines: Address
    long_sines: Address
    lengths: Address
    cosines: Address
    sines: Address
    num_rows: int
    half: int
    limit: int


class RotateArguments(NamedTuple):
    x: Address
    out: Address
    cosines: Address
    sines: Address
    num_rows: int
    num_heads: int
    d_head: int
    x_stride: int
    period: int
    half: int


class ActivateArguments(NamedTuple):
    pre: Address
    linear: Address
    out: Address
    num_rows: int
    size: int
    pre_stride: int
    linear_stride: int


# statistics.cpp


class DistributionArguments(NamedTuple):
    x: Address
    probabilities: Address
    log_totals: Address
    num_rows: int
    size: int


class ArgmaxArguments(NamedTuple):
    x: Address
    values: Address
    indices: Address
    bitmasks: Address
    num_rows: int
    size: int
    words_per_row: int


class TensorLayout(NamedTuple):
    address: Address
    num_elements: int
    stride: int
    size: int


class MomentsArguments(NamedTuple):
    layouts: Address
    moments: Address
    num_tensors: int


class SummaryStatistics(NamedTuple):
    minimum: float
    maximum: float
    mean: float
    standard_deviation: float
    l2_norm: float
    num_missing: float


class SummariesArguments(NamedTuple):
    layouts: Address
    moments: Address
    summaries: Address
    num_tensors: int


# tracing.cpp


class TopArguments(NamedTuple):
    x: Address
    values: Address
    indices: Address
    num_rows: int
    size: int
    num_top: int


class Piece(NamedTuple):
    address: Address
    place: int
    size: int


class CopyPiecesArguments(NamedTuple):
    pieces: Address
    out: Address
    num_pieces: int


# edits.cpp


class EditRowsArguments(NamedTuple):
    x: Address
    rows: Address
    heads: Address
    vectors: Address
    places: Address
    num_rows: int
    num_heads: int
    num_edited: int
    size: int
    vector_stride: int
    head_stride: int
    kind: int
    first: float
    second: float


class CopyRowsArguments(NamedTuple):
    x: Address
    out: Address
    num_rows: int
    size: int
    x_stride: int


class ApplyPatternArguments(NamedTuple):
    pattern: Address
    v: Address
    out: Address
    T: int
    H: int
    Hkv: int
    D: int
    S: int
    v_stride: int


# sampling.cpp


class DrawParameters(NamedTuple):
    temperature: float
    top_k: float
    top_p: float
    min_p: float


class DrawArguments(NamedTuple):
    logits: Address
    rows: Address
    parameters: Address
    keys: Address
    tokens: Address
    bitmasks: Address
    num_draws: int
    size: int
    words_per_row: int


# attention.cpp


class WriteQuantizedArguments(NamedTuple):
    k: Address
    v: Address
    keys: Address
    values: Address
    key_magnitudes: Address
    value_magnitudes: Address
    slots: Address
    num_rows: int
    num_heads: int
    D: int
    k_stride: int
    v_stride: int


class AttentionArguments(NamedTuple):
    q: Address
    keys: Address
    values: Address
    z: Address
    blocks: Address
    cu_seqlens: Address
    start: Address
    partials: Address
    key_magnitudes: Address
    value_magnitudes: Address
    num_sequences: int
    max_blocks: int
    block_size: int
    max_chunks: int
    H: int
    Hkv: int
    D: int
    window: int
    q_stride: int
    k_stride: int
    v_stride: int
    scale: float
    softcap: float


class AttentionScoresArguments(NamedTuple):
    q: Address
    keys: Address
    blocks: Address
    start: Address
    key_magnitudes: Address
    scores: Address
    masked: Address
    pattern: Address
    N: int
    block_size: int
    H: int
    Hkv: int
    D: int
    window: int
    q_stride: int
    k_stride: int
    scale: float
    softcap: float


# linear.cpp


class LinearArguments(NamedTuple):
    x: Address
    w: Address
    b: Address
    y: Address
    M: int
    N: int
    K: int


class WidenArguments(NamedTuple):
    x: Address
    out: Address
    num_elements: int


# grouped_linear.cpp


class QuantizeGroupsArguments(NamedTuple):
    x: Address
    groups: Address
    M: int
    K: int


class GroupedLinearArguments(NamedTuple):
    groups: Address
    integers: Address
    scales: Address
    b: Address
    y: Address
    M: int
    N: int
    K: int
    y_stride: int
    is_bfloat16: int


# pack.cpp


class PackArguments(NamedTuple):
    rows: Address
    out: Address
    N: int
    K: int


class QuantizeWeightArguments(NamedTuple):
    rows: Address
    integers: Address
    scales: Address
    N: int
    K: int
