"""The bundled checkpoint: what `transformers` reads in the same directory is the same network."""

import torch
import transformers

from model.checkpoint import load_checkpoint
from service.app import BUNDLED


def test_transformers_loads_the_same_network() -> None:
    ours = load_checkpoint(str(BUNDLED), dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    assert ours.tokenizer is not None
    ids = torch.tensor([ours.tokenizer.encode("It was a dark night, and the captain had gone below.")])
    with torch.inference_mode():
        torch.testing.assert_close(ours.model(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(BUNDLED / "tokenizer.json"))
    assert fast.encode("the cat sat on") == ours.tokenizer.encode("the cat sat on")
