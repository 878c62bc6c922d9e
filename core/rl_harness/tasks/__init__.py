"""Task directories, the registry of benchmarks, and the verifier."""
