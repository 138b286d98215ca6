"""Which numerics a run uses: the precision table, autocast, loss scaling, fp8 recipes."""
