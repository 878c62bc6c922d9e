"""The command line. Starting it imports click and nothing else; each command imports what it needs when it runs."""
