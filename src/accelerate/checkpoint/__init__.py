"""Checkpoints: what the files are called, how they are written and read, and which folders are kept."""
