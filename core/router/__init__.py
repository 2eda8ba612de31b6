"""Routing of requests over replicas, and the engine client in front of them."""
