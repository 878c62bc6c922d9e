"""Sandboxes of rl-harness in Docker containers."""
