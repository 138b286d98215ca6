"""Experiment trackers, under their public names."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.trackers.base": "GeneralTracker on_main_process",
    "accelerate.extensions.trackers.libraries": "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker MLflowTracker SwanLabTracker "
    "TensorBoardTracker TrackioTracker WandBTracker",
    "accelerate.extensions.trackers.registry": "LOGGER_TYPE_TO_CLASS filter_trackers get_available_trackers register_tracker_class",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
