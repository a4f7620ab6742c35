"""The operations of a network, a sampler and a trace with our own kernels for CPUs, written in C++ (`csrc`).

`choose_backend` in model/network/prepare.py decides between these and PyTorch.
"""
