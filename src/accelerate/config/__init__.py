"""What a user may configure: the enumerations, keyword handlers and plugins that reach the rest of the package as values.

`accelerate.utils.dataclasses` is the public address of everything in here.
"""
