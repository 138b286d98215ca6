"""The ground floor: what every other room may import, and what imports no other room."""
