"""A library for decoder-only transformers whose forward pass can be read and changed."""
