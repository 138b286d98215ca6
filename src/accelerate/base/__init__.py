"""Helpers that every other room may import. They import no other room."""
