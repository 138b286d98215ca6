"""Patches for installed transformers releases that keep the shared accelerator state whole."""
