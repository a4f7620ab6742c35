"""Decoder-only transformers that can be looked into: the network, its checkpoints and its generation."""
