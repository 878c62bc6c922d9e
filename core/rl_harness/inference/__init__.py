"""Replicas, routing, resuming interrupted turns, weights out."""
