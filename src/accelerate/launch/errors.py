"""What goes wrong before anything is started."""


class LaunchError(ValueError):
    """The request cannot be run as written; the command line answers it with one line and exit status 2."""


class NotAvailableError(LaunchError, NotImplementedError):
    """The request is understood, and this version has no way to run it yet."""


class MissingPackageError(LaunchError, ModuleNotFoundError):
    """A package that the request needs is not installed."""


class MissingAccountError(LaunchError, OSError):
    """The request needs an account of a provider, and names none."""


class RunError(RuntimeError):
    """A run has begun and cannot go on for a reason that lies outside the script; the command line answers with `status`."""

    status = 1
