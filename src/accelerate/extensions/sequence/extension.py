"""The actions of context and sequence parallelism at `prepare`."""

from typing import Any

from accelerate.extension import Extension
from accelerate.extensions.sequence import models, sequence


class SharedSequences(Extension):
    """Lets models work on parts of sequences; `Accelerator._cp_context`, which libraries replace, makes the context of a batch."""

    order = 30

    @property
    def serves(self) -> tuple[str, ...]:
        """The sizes of the mesh that are in use."""
        layout = self.run.parallelism_config
        return tuple(name for name in ("cp_size", "sp_size") if getattr(layout, name, 1) > 1)

    def arrives(self, models: list[Any], evaluation: bool) -> None:
        """Refuse DeepSpeed's sequence parallelism without its plugin."""
        layout = self.run.parallelism_config
        if layout._sp_by_deepspeed and not evaluation:
            raise ValueError(
                f"sp_size={layout.sp_size} with sp_backend='deepspeed' needs deepspeed_plugin=DeepSpeedPlugin(...). Pass it, or set "
                "sp_backend='torch', which does the same with torch only."
            )

    def convert(self, model: Any, evaluation: bool) -> Any:
        """Let a model work on parts of sequences inside the context; one for evaluation is refused in it if it cannot be exact."""
        run = self.run
        if evaluation:
            run._prepare_device_mesh()
        trained = () if evaluation else (model,)
        if run.parallelism_config.cp_enabled:
            run._prepare_cp(*trained)
        else:
            sequence.prepare(run, "sp", trained)
        if evaluation:
            models.join(model, run._cp_context)
        return model
