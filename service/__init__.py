"""The HTTP service around `model`."""

import os

# OpenMP's threads, which PyTorch uses where we have no kernel, otherwise look for work for milliseconds after each
# call, on the processors that the kernels' own threads need. Read when torch is imported, so it must be here.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
