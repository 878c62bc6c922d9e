"""The address agents point at: protocols, sessions, the turn tree."""
