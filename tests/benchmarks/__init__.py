"""Benchmarks: programs to run by hand, not tests. Each prints a table, and then one line of JSON."""

import service  # noqa: F401 (sets how the threads of PyTorch wait, which is read when torch is imported)
