"""Replicas, routing, resuming interrupted turns, weights out."""

from rl_harness.inference.replicas import Replicas

__all__ = ["Replicas"]
