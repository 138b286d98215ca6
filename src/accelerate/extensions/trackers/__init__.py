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
SPEC = Spec(
    "trackers",
    trackers={name: f"accelerate.extensions.trackers.libraries:{tracker}" for name, tracker in _CLASSES.items()},
)
