"""Experiment trackers: the contract, one file per library, and the registry of their names."""
