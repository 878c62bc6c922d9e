"""The run directory: database, configuration, checkpoints, resume."""
