"""Which libraries of trackers are installed; importing this module imports none of them."""

from accelerate.base.imports import is_installed, library
from accelerate.base.versions import compare_versions

is_wandb_available = library("wandb")
is_comet_ml_available = library("comet_ml")
is_mlflow_available = library("mlflow", "mlflow", "mlflow-skinny")
is_clearml_available = library("clearml")
is_dvclive_available = library("dvclive")
is_swanlab_available = library("swanlab")
is_trackio_available = library("trackio")


def is_aim_available() -> bool:
    """Tell whether Aim 3 is installed; Aim 4 has another interface."""
    return is_installed("aim") and compare_versions("aim", "<", "4.0.0")


def is_tensorboard_available() -> bool:
    """Tell whether TensorBoard or tensorboardX is installed."""
    return is_installed("tensorboard", "tensorboard", "tb-nightly") or is_installed("tensorboardX")
