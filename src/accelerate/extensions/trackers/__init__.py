"""Trackers of nine libraries, which `log_with` names."""

from accelerate.extension import Spec

_CLASSES = {
    "aim": "AimTracker",
    "comet_ml": "CometMLTracker",
    "mlflow": "MLflowTracker",
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandBTracker",
    "clearml": "ClearMLTracker",
    "dvclive": "DVCLiveTracker",
    "swanlab": "SwanLabTracker",
    "trackio": "TrackioTracker",
}
_RUN = "accelerate.extensions.trackers.run"
SPEC = Spec(
    "trackers",
    extension=f"{_RUN}:Trackers",
    attaches=lambda run: run.log_with != [],
    methods={name: f"{_RUN}:{name}" for name in ("init_trackers", "get_tracker", "log")},
    trackers={name: f"accelerate.extensions.trackers.libraries:{tracker}" for name, tracker in _CLASSES.items()},
)
