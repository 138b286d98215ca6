"""The errors of this package."""


class UnsupportedVersion(RuntimeError):
    """The installed release, or the shape of its code, is not one that a patch was written for; nothing was changed."""
