"""Stages of other programs are found by name and shape, and untrusted files are read within limits."""

import json
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from model.analysis.compare.sources import (
    StageTensors,
    computed_dtype,
    match_stages,
    read_safetensors_bytes,
    read_stage_file,
)
from model.errors import CheckpointError, InvalidField
from model.tracing.stages import sizes_of, stages_of
from tests.tiny import CONFIGS

LLAMA, GPT2 = CONFIGS["llama"], CONFIGS["gpt2"]
IDS = list(range(5))
SIZES = sizes_of(LLAMA, len(IDS))


def shape_of(name: str) -> tuple[int, ...]:
    return next(stage for stage in stages_of(LLAMA) if stage.name == name).shape(SIZES)


def match(tensors: dict[str, Tensor], config: Any = LLAMA, ids: list[int] | None = None, **names: str | None) -> Any:
    return match_stages(StageTensors("b", tensors, ids), config, IDS, names or None)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("blocks.1.resid_post", "blocks.1.resid_post"),
        ("blocks.1.hook_resid_post", "blocks.1.resid_post"),
        ("blocks.0.attn.hook_rot_q", "blocks.0.attn.rot_q"),
        ("hook_embed", "embed"),
        ("ln_final.hook_normalized", "ln_final.normalized"),
        ("hidden_states.0", "blocks.0.resid_pre"),
        ("hidden_states[2]", "blocks.2.resid_pre"),
        ("hidden_states_3", "ln_final.out"),
        ("model.layers.2", "blocks.2.resid_post"),
        ("model.layers.2.input_layernorm", "blocks.2.ln1.out"),
        ("model.layers.0.mlp.down_proj.output", "blocks.0.mlp_out"),
        ("model.norm", "ln_final.out"),
        ("lm_head", "logits"),
    ],
)
def test_the_names_of_other_programs_are_known(name: str, stage: str) -> None:
    assert list(match({name: torch.rand(shape_of(stage))}).stages) == [stage]


def test_a_layer_norm_of_transformerlens_is_read_after_its_gain() -> None:
    tensor = torch.rand(1, len(IDS), GPT2.d_model)
    assert list(match({"blocks.0.ln1.hook_normalized": tensor}, GPT2).stages) == ["blocks.0.ln1.out"]
    assert list(match({"blocks.0.ln1.normalized": tensor}, GPT2).stages) == ["blocks.0.ln1.normalized"]


def test_stacked_hidden_states_are_divided() -> None:
    stacked = torch.rand(LLAMA.num_layers + 1, 1, len(IDS), LLAMA.d_model)
    found = match({"hidden_states": stacked}).stages
    assert list(found) == [*(f"blocks.{layer}.resid_pre" for layer in range(3)), "ln_final.out"]
    assert torch.equal(found["ln_final.out"][0].tensor, stacked[3])


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q,
        lambda q: q[0],
        lambda q: q.transpose(1, 2),
        lambda q: q[0].transpose(0, 1),
        lambda q: q.flatten(2),
        lambda q: q[0].flatten(1),
    ],
)
def test_heads_may_be_laid_out_in_any_usual_way(change: Any) -> None:
    q = torch.rand(shape_of("blocks.0.attn.q"))
    (layout,) = match({"blocks.0.attn.q": change(q)}).stages["blocks.0.attn.q"]
    assert torch.equal(layout.tensor, q)


def test_as_many_positions_as_heads_leave_both_layouts_open() -> None:
    ids = list(range(LLAMA.num_heads))
    q = torch.rand(1, LLAMA.num_heads, LLAMA.num_heads, LLAMA.d_head)
    found = match_stages(StageTensors("b", {"blocks.0.attn.q": q}), LLAMA, ids)
    first, second = found.stages["blocks.0.attn.q"]
    assert torch.equal(first.tensor, q)
    assert torch.equal(second.tensor, q.transpose(1, 2))


def test_a_shape_that_does_not_fit_is_refused_with_both_shapes() -> None:
    with pytest.raises(InvalidField, match=r"\(1, 4, 24\), but embed is \(1, 5, 24\) \(batch, position, d_model\)"):
        match({"embed": torch.rand(1, 4, 24)})


def test_two_tensors_of_one_stage_are_refused_unless_they_are_equal() -> None:
    embed = torch.rand(1, 5, 24)
    assert list(match({"embed": embed, "hook_embed": embed.clone()}).stages) == ["embed"]
    with pytest.raises(InvalidField, match="embed and hook_embed are both the stage embed, but differ"):
        match({"embed": torch.rand(1, 5, 24), "hook_embed": torch.rand(1, 5, 24)})


def test_other_tensors_are_listed_and_a_file_without_stages_is_refused() -> None:
    found = match({"embed": torch.rand(1, 5, 24), "blocks.0.hook_mlp_in": torch.rand(1, 5, 24)})
    assert found.unknown == ["blocks.0.hook_mlp_in"]
    with pytest.raises(InvalidField, match=r"it has blocks\.9\.resid_pre"):
        match({"blocks.9.resid_pre": torch.rand(1, 5, 24)})


def test_the_first_other_token_id_is_named() -> None:
    embed = {"embed": torch.rand(1, 5, 24)}
    with pytest.raises(InvalidField, match="first at position 3: A has 3, B has 9"):
        match(embed, ids=[0, 1, 2, 9, 4])
    with pytest.raises(InvalidField, match="A has 5 tokens, B has 4; the first 4 are equal"):
        match(embed, ids=[0, 1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_stages_that_are_not_read_are_refused_with_their_dtype(dtype: torch.dtype) -> None:
    embed = torch.rand(1, 5, 24)
    assert list(match({"embed": embed.double(), "other": embed.to(dtype)}).stages) == ["embed"]
    with pytest.raises(InvalidField, match=f"embed is {str(dtype).removeprefix('torch.')}"):
        match({"embed": embed.to(dtype)})


@pytest.mark.parametrize("name", ["hidden_states.", "attentions.", "model.layers."])
def test_a_name_with_very_many_digits_is_no_stage(name: str) -> None:
    found = match({"embed": torch.rand(1, 5, 24), name + "9" * 5000: torch.rand(1)})
    assert list(found.unknown) == [name + "9" * 5000]


def test_the_dtype_in_which_numbers_were_computed_shows_in_them() -> None:
    numbers = torch.rand(8, 8)
    assert computed_dtype([numbers, numbers.double()]) == torch.float32
    assert computed_dtype([numbers.bfloat16().float(), numbers.bfloat16(), numbers]) == torch.bfloat16
    assert computed_dtype([numbers.half().float()]) == torch.float16


# Files


def test_safetensors_and_npz_files_are_read_with_their_token_ids(tmp_path: Path) -> None:
    tensors = {"embed": torch.rand(1, 5, 24), "input_ids": torch.tensor([IDS])}
    save_file(tensors, tmp_path / "a.safetensors")
    np.savez_compressed(tmp_path / "b.npz", embed=tensors["embed"].numpy(), tokens=np.array(IDS, np.int32))
    np.savez(tmp_path / "c.npz", embed=np.asfortranarray(tensors["embed"].numpy()), ids=np.array(IDS))
    answer = {"forwardscope": json.dumps({"tokens": [{"id": each} for each in IDS]})}
    found = [read_stage_file(tmp_path / name) for name in ("a.safetensors", "b.npz", "c.npz")]
    found += [read_safetensors_bytes(save({"embed": tensors["embed"]}, answer), "d")]
    for each in found:
        assert each.ids == IDS
        assert list(each.tensors) == ["embed"]
        assert torch.equal(each.tensors["embed"], tensors["embed"])


@pytest.mark.parametrize("ids", [torch.tensor([IDS], dtype=torch.float32), torch.tensor(IDS, dtype=torch.int16)])
def test_token_ids_may_be_stored_as_any_whole_numbers(ids: Tensor) -> None:
    assert read_safetensors_bytes(save({"input_ids": ids, "embed": torch.rand(1)}), "b").ids == IDS


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([IDS, IDS]),
        torch.tensor([0.5, 1]),
        torch.tensor([torch.inf, 1]),
        torch.tensor([True, False]),
        torch.tensor([1, 2], dtype=torch.complex64),
        torch.tensor(1),
    ],
)
def test_token_ids_that_are_not_those_of_one_prompt_are_refused(ids: Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"tokens(: has the dtype .* and the shape| is C64)"):
        read_safetensors_bytes(save({"tokens": ids, "embed": torch.rand(1)}), "b")


def safetensors_bytes(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_file_without_metadata_may_say_so_with_null(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    content = safetensors_bytes({"__metadata__": None, "embed": entry}, bytes(4))
    (tmp_path / "a.safetensors").write_bytes(content)
    for found in (read_safetensors_bytes(content, "a"), read_stage_file(tmp_path / "a.safetensors")):
        assert found.ids is None
        assert list(found.tensors) == ["embed"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was opened",))


def test_no_pickle_is_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([Evil()], dtype=object))
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "c.npz").write_bytes(pickle.dumps(Evil()))
    for name in ("a.npz", "b.pt", "c.npz"):
        with pytest.raises(CheckpointError, match=name):
            read_stage_file(tmp_path / name)


def npy(shape: tuple[int, ...], numbers: bytes) -> bytes:
    return npy_of(str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode(), numbers)


def npy_of(header: bytes, numbers: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + numbers


@pytest.mark.parametrize(
    "member",
    [
        npy((1 << 40,), b""),
        npy((3,), bytes(8)),
        npy((-1,), bytes(4)),
        npy((True, 1), bytes(4)),
        npy((1.0,), bytes(4)),  # type: ignore[arg-type]
        b"",
        b"\x93NUMPY\x09\x00",
        bytes(100),
        npy_of(b"(" * 4000),
        npy_of(b"(" * 4000 + b")" * 4000),
        npy_of(b"-" * 9000 + b"1"),
        npy_of(b"[" * 90 + b"]" * 90),
        npy_of(b'"' * 3),
        npy_of(b"{1: [}"),
    ],
)
def test_an_array_whose_header_does_not_fit_its_numbers_is_refused(tmp_path: Path, member: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("embed.npy", member)
    with pytest.raises(CheckpointError, match="embed"):
        read_stage_file(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_damaged_npz_file_is_refused(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("embed.npy", npy((1000,), np.random.default_rng(0).bytes(4000)))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    for first in (39, 44, 60, 200):
        damaged = content[:first] + b"\xff" * 40 + content[first + 40 :]
        (tmp_path / "a.npz").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"a\.npz: "):
            read_stage_file(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_member_that_unpacks_to_more_than_it_states_is_not_unpacked(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("embed.npy", npy((16 << 20,), bytes(64 << 20)))
    content = (tmp_path / "a.npz").read_bytes()
    whole = (64 << 20) + len(npy((16 << 20,), b""))
    assert content.count(whole.to_bytes(4, "little")) == 2  # before the member, and in the directory
    (tmp_path / "a.npz").write_bytes(content.replace(whole.to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"a\.npz: "):
            read_stage_file(tmp_path / "a.npz", 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_tensors_with_long_names_are_refused(tmp_path: Path) -> None:
    for name in ("model." * 1000, "model." * 20_000 + "\n"):
        with pytest.raises(CheckpointError, match="a name of more than 200 characters"):
            read_safetensors_bytes(save({name: torch.rand(1)}), "b")


def test_a_compressed_file_that_would_be_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.analysis.compare.sources.MAX_FILE_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", embed=np.zeros(1 << 20, np.float32))
    assert (tmp_path / "a.npz").stat().st_size < 1 << 16
    with pytest.raises(CheckpointError, match="the limits are 8192 and 1048576"):
        read_stage_file(tmp_path / "a.npz")
    with pytest.raises(CheckpointError, match="the limits are 8192 and 131072"):
        read_stage_file(tmp_path / "a.npz", 1 << 17)


def test_a_file_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").mkdir()
    for name in ("a.npz", "missing.npz"):
        with pytest.raises(CheckpointError, match=name):
            read_stage_file(tmp_path / name)
