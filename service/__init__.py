"""The HTTP service around `model`."""

import os

# PyTorch uses OpenMP threads for operations without a kernel of ours. By default these threads spin for milliseconds
# after each call, on the processors that our kernels' threads need. torch reads the variable when it is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

PREFIX = "FORWARDSCOPE_"  # of the environment variables with settings
