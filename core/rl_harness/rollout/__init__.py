"""One episode, many episodes, and the built-in harnesses."""
