"""The service, driven over loopback HTTP as its users drive it."""
