"""Continuous batching: many sequences through one network, a step at a time, over a paged key-value cache."""
