"""One file an endpoint, or a family of them."""
