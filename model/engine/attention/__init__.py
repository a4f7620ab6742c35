"""How the sequences of a step attend over the paged cache: one interface, four implementations."""
