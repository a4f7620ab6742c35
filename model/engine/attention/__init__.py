"""How the sequences of a step attend over the paged cache: one interface, three implementations."""
