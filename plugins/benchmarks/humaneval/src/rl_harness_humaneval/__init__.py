"""HumanEval as task directories."""
