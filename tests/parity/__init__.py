"""The network against other programs that compute the same."""
