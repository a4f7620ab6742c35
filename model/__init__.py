"""A library for decoder-only transformers whose forward pass can be read and changed."""

__version__ = "0.1.0"
"""The version of the distribution: of this library, of the service, and of the package `forwardscope`."""
