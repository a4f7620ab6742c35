"""Write simple stories about a small world, to train a small network on."""
