"""Mutation testing: small changes of the source, made by rules, which a test must detect. `make mutants` runs
it.
"""
