"""Experiment trackers: the contract, and the registry of their names."""
