"""Mutation testing: small changes made by rule, each of which some test must notice. `make mutants` runs it."""
