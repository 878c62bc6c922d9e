"""Numbers for people and machines out of a run's records."""
