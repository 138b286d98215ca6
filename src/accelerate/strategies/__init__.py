"""How processes cooperate: one module per strategy, chosen late by the registry."""
