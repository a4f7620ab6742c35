"""Tests of the engine: blocks and scheduler by themselves, then whole batches against the plain network."""
