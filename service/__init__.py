"""The HTTP service around `model`."""
