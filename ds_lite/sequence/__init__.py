"""Sequence parallelism: the tokens of one sequence over several ranks (§9.5 §9.14)."""
