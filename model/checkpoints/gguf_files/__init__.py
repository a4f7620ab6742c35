"""Checkpoints in the GGUF format of llama.cpp: a model, its tokenizer and its chat templates in one file."""

from model.checkpoints.gguf_files.checkpoint import GGUFCheckpoint, read_gguf_checkpoint
from model.checkpoints.gguf_files.parts import find_gguf

__all__ = ["GGUFCheckpoint", "find_gguf", "read_gguf_checkpoint"]
