"""Kernels for CPUs, where they are faster than PyTorch's."""
