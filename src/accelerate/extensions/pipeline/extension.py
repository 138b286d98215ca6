"""The actions of pipelines at `prepare`; `prepare_pipeline` makes them."""

from typing import Any

from accelerate.extension import Extension


class Pipelines(Extension):
    """Refuses stages that train in no pipeline of this package."""

    @property
    def serves(self) -> tuple[str, ...]:
        """The size of the mesh, if it is in use."""
        return ("pp_size",) if getattr(self.run.parallelism_config, "pp_size", 1) > 1 else ()

    def arrives(self, models: list[Any], evaluation: bool) -> None:
        """Refuse stages that transformers made."""
        for model in models:
            stages = getattr(getattr(model, "_pp_stage", None), "pp_size", 1)
            if stages > 1 and not evaluation:
                raise ValueError(
                    f"{type(model).__name__} was loaded as one of {stages} pipeline stages by transformers, whose stages exchange no "
                    "gradients. Load the full model without DistributedConfig(pp_size=...), and call accelerator.prepare_pipeline(model, ...)."
                )
