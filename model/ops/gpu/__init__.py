"""The operations of a network with our own Triton kernels, on an NVIDIA GPU."""
