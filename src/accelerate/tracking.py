"""Experiment trackers, under their public names."""

from accelerate.trackers.aim import AimTracker
from accelerate.trackers.base import GeneralTracker, on_main_process
from accelerate.trackers.clearml import ClearMLTracker
from accelerate.trackers.comet import CometMLTracker
from accelerate.trackers.dvclive import DVCLiveTracker
from accelerate.trackers.mlflow import MLflowTracker
from accelerate.trackers.registry import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accelerate.trackers.runs import SwanLabTracker, TrackioTracker, WandBTracker
from accelerate.trackers.tensorboard import TensorBoardTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
