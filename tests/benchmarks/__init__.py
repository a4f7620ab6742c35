"""Benchmarks: programs to run by hand, not tests. Each prints a table and, last, one line of JSON."""
