"""Pull requests for upstream: `python -m transformers_patch export` writes them against a given source tree."""
