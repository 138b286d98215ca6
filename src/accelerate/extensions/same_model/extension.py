"""The comparison before `fully_shard`, which takes each rank's part from that rank, and compares nothing."""

from collections.abc import Collection
from typing import Any

from accelerate.extension import Extension
from accelerate.extensions.same_model.consistency import require_same_model
from accelerate.strategies.shard import experts_of


class SameModel(Extension):
    """Compares each model that is sharded."""

    order = 90  # after extensions that refuse a model

    def sharding(self, model: Any, ignored: Collection[Any], policies: dict[Any, Any], units: set[Any]) -> None:
        """Require the same model of all ranks, and give them the weights of rank 0 if values differ."""
        run = self.run
        if not experts_of(run, model):  # full models were compared before their experts were sharded
            require_same_model(run, model, ignored, from_main=run.state.fsdp_plugin.cpu_ram_efficient_loading)
