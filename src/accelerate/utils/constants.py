"""File names, versions and words of other programs. The public path of `accelerate.base.constants`."""

from accelerate.base.constants import *  # noqa: F403
from accelerate.base.constants import __getattr__ as __getattr__
