"""Forwardscope on Ray Serve: replicas of the service on one or many hosts, behind one address."""
