"""Benchmarks: programs to run by hand, not tests. Each prints a table and, last, one line of JSON."""

import service  # noqa: F401 (it tells PyTorch's threads how to wait, which they read when torch is imported)
