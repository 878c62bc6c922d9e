"""One module an agent: its package, environment, configuration files and command line."""
