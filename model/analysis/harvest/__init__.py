"""Run a network over a corpus and store the rows of some stages, or statistics of them."""
