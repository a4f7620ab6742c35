"""Comparisons of the network with other programs that compute the same function."""
