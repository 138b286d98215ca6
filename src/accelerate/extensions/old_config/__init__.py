"""Configuration files that older releases wrote."""

from accelerate.extension import Spec

SPEC = Spec("old_config", options="accelerate.extensions.old_config.spellings")
