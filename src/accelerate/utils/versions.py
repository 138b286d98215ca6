"""Versions of installed libraries. The public path of `accelerate.base.versions`."""

from accelerate.base.versions import *  # noqa: F403
from accelerate.base.versions import __getattr__ as __getattr__
