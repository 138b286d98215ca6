"""Help with installing torch_xla."""

import importlib.metadata
import subprocess
import sys

from accelerate.base.environment import is_colab


def install_xla(upgrade: bool = False) -> None:
    """Install the TPU build of torch_xla for the torch that is installed, in a notebook of Google Colab.

    Args:
        upgrade: also replace a torch_xla that is installed.

    Raises:
        RuntimeError: this is not Colab; there is no torch, or it is a development build, for which there is no torch_xla
            release.
        subprocess.CalledProcessError: pip failed.

    Source: https://github.com/pytorch/xla#installation
    """
    if not is_colab():
        raise RuntimeError(
            "install_xla() changes the environment of a Google Colab notebook, and this is none. Install torch_xla yourself, "
            "for the torch that you have: `pip install 'torch_xla[tpu]==<version of torch>'`."
        )
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("torch_xla must match torch, which is not installed. Install torch first.") from None
    release, _, _ = torch_version.partition("+")
    if not release.replace(".", "").isdigit():
        raise RuntimeError(f"torch is the development build {torch_version}; torch_xla exists for releases only.")
    command = [sys.executable, "-m", "pip", "install", f"torch_xla[tpu]=={release}"]
    if upgrade:
        command.append("--upgrade")
    subprocess.run(command, check=True)
