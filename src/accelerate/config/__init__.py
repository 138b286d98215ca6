"""The settings of a user: the enumerations, keyword handlers and plugins that reach the rest of the package as values.

`accelerate.utils.dataclasses` is their public module.
"""
