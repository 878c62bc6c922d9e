"""The jobs that compose the parts: evaluate and train."""
