"""Constants that the C++ code in `csrc` declares, too, by the names in `CONSTANTS`.

`shared_layout.py` compares both sides when a library is loaded.
"""

from model.ops.row_edits import RuleKind
from model.ops.weight_formats import GROUP, SUPERGROUP

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
