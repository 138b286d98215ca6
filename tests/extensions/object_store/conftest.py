"""Object stores for the tests of this folder."""

from unit.checkpoint.conftest import base, memory, s3, s3_server

__all__ = ["base", "memory", "s3", "s3_server"]
