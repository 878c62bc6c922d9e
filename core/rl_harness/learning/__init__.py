"""Credit, advantages, aggregation, losses: numpy, no torch."""
