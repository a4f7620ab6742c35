"""The values of GGUF tensors are bitwise those of the `gguf` package, however they are read."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from model.checkpoints.gguf_files import dequantize, read_gguf_checkpoint
from model.checkpoints.gguf_files.dequantize import FLOATS, QUANTIZED, TensorRows
from model.checkpoints.gguf_files.header import read_header
from model.checkpoints.gguf_files.tensors import GGUFTensors
from tests.checkpoints.test_gguf_models import CASES, tiny_config
from tests.published_models import gemma3_gguf, smollm2_gguf
from tests.tiny import write_reference
from tests.tiny_gguf import write_gguf

ROWS, COLUMNS = 37, 512


def random_blocks(kind: Kind) -> np.ndarray:
    """Rows of random blocks. Every sequence of bytes is a valid block; scales may be infinite or NaN."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(int(kind)).integers(0, 256, (ROWS, COLUMNS // block_size * block_bytes), np.uint8)


def write_tensor(path: Path, data: np.ndarray, kind: Kind) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("chunk", [1 << 9, 5 << 9, 1 << 20])
@pytest.mark.parametrize("kind", [*FLOATS, *QUANTIZED], ids=lambda kind: kind.name)
def test_values_are_bitwise_those_of_the_gguf_package(
    kind: Kind, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", chunk)
    data = random_blocks(kind)
    header = read_header(write_tensor(tmp_path / "model.gguf", data, kind))
    tensors = GGUFTensors([header.file], header.tensors, {"model_type": "llama"})
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(data, kind)).view(ROWS, COLUMNS)
    tensor = tensors.read("model.embed_tokens.weight")
    assert tensor.dtype == FLOATS.get(kind, torch.float32)
    assert tensors.headers["model.embed_tokens.weight"].stored_as == kind.name
    if kind in QUANTIZED or kind is Kind.F32:
        assert bits(tensor).equal(bits(expected))
    else:
        assert torch.allclose(tensor.float(), expected, rtol=0, atol=0, equal_nan=True)
    if kind in QUANTIZED:
        tensors = GGUFTensors([header.file], header.tensors, {"model_type": "llama"}, quantized_as=torch.bfloat16)
        rounded = tensors.read("model.embed_tokens.weight")
        assert torch.allclose(rounded, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.Q4_K, torch.bfloat16)])
def test_only_quantized_tensors_get_the_dtype_that_is_asked_for(kind: Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    header = read_header(write_tensor(tmp_path / "model.gguf", random_blocks(kind), kind))
    tensors = GGUFTensors([header.file], header.tensors, {"model_type": "llama"}, quantized_as=torch.bfloat16)
    assert tensors.headers["model.embed_tokens.weight"].dtype == dtype
    assert tensors.read("model.embed_tokens.weight").dtype == dtype


@pytest.mark.parametrize("name", ["llama with biases", "gpt2", "gpt_neox", "mixtral", "gemma3", "stablelm 2"])
def test_quantized_rows_go_to_the_same_places_as_rows_of_float32(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "n_embd": 64, "head_dim": 16, "query_pre_attn_scalar": 16}
    model_type, options = CASES[name]
    write_reference(tiny_config(model_type, options | {key: sizes[key] for key in sizes.keys() & options}), tmp_path)
    exact = read_gguf_checkpoint(write_gguf(tmp_path, tmp_path / "f32.gguf")).tensors
    path = write_gguf(tmp_path, tmp_path / "q8.gguf", kind=Kind.Q8_0)
    rounded = read_gguf_checkpoint(path, quantized_as=torch.float32).tensors
    assert exact.headers.keys() == rounded.headers.keys()
    kinds = {header.stored_as for header in rounded.headers.values()}
    assert kinds == {"F32", "Q8_0"}
    for tensor in exact.headers:
        values = exact.read(tensor)
        error = (rounded.read(tensor) - values).abs().max()
        assert error <= values.abs().max() / 127, tensor


@pytest.mark.slow
@pytest.mark.parametrize("published", [smollm2_gguf, gemma3_gguf])
def test_a_published_file_gives_the_config_and_the_weights_that_transformers_reads(
    published: Callable[[], Path],
) -> None:
    transformers = pytest.importorskip("transformers")
    path = published()
    checkpoint = read_gguf_checkpoint(path, quantized_as=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    theirs = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    assert checkpoint.tensors.headers.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert checkpoint.tensors.read(name).equal(weight), name
    ours = tiny_config(checkpoint.config["model_type"], dict(checkpoint.config)).to_dict()
    config = model.config.to_dict()
    for key in ours.keys() - {"architectures", "rms_norm_eps", "_name_or_path", "dtype", "quantization_config"}:
        assert ours[key] == config[key], key
    assert np.float32(ours["rms_norm_eps"]) == np.float32(config["rms_norm_eps"])


def test_rows_of_an_old_file_with_one_tensor_for_each_expert_are_found(tmp_path: Path) -> None:
    write_reference(tiny_config(*CASES["mixtral"]), tmp_path)
    files = read_gguf_checkpoint(write_gguf(tmp_path, tmp_path / "model.gguf"))
    stacked = read_header(tmp_path / "model.gguf").tensors["blk.0.ffn_up_exps.weight"]
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    values = TensorRows(stacked).values(0, TensorRows(stacked).num_rows).view(stacked.shape)
    for expert, matrix in enumerate(values):
        writer.add_tensor(f"blk.0.ffn_up.{expert}.weight", matrix.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "old.gguf")
    old = GGUFTensors([header.file], header.tensors, files.config)
    assert len(old.headers) == 4
    for name in old.headers:
        assert old.read(name).equal(files.tensors.read(name))


@pytest.mark.parametrize("name", ["llama with biases", "gpt2", "gpt_neox"])
def test_values_are_read_while_a_network_is_built_on_the_meta_device(name: str, tmp_path: Path) -> None:
    write_reference(tiny_config(*CASES[name]), tmp_path)
    tensors = read_gguf_checkpoint(write_gguf(tmp_path, tmp_path / "model.gguf")).tensors
    for tensor in tensors.headers:
        with torch.device("meta"):
            values = tensors.read(tensor)
        assert values.equal(tensors.read(tensor))
