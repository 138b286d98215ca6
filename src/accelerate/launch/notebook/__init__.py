"""Training functions started in several processes, from a notebook, a console or a test; `accelerate.launchers` is its public home."""
