"""Experiment trackers: the contract, one class per library, and the registry of their names."""
