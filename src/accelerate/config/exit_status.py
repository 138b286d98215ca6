"""Statuses with which a process of a run ends on purpose."""

# EX_TEMPFAIL of sysexits.h, "try again later": the run was told to stop, has saved a checkpoint, and goes on when it is
# submitted again.
PREEMPTED = 75
