"""From a command line to running processes: the option table as flags, resolution into a frozen plan, and its runners.

Nothing in here imports torch before it has to start several processes.
"""
