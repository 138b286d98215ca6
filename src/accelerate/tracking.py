"""Experiment trackers, under their public names."""

from accelerate._lazy import front

_HOMES = {
    "accelerate.trackers.aim": "AimTracker",
    "accelerate.trackers.base": "GeneralTracker on_main_process",
    "accelerate.trackers.clearml": "ClearMLTracker",
    "accelerate.trackers.comet": "CometMLTracker",
    "accelerate.trackers.dvclive": "DVCLiveTracker",
    "accelerate.trackers.mlflow": "MLflowTracker",
    "accelerate.trackers.registry": "LOGGER_TYPE_TO_CLASS filter_trackers get_available_trackers register_tracker_class",
    "accelerate.trackers.runs": "SwanLabTracker TrackioTracker WandBTracker",
    "accelerate.trackers.tensorboard": "TensorBoardTracker",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
