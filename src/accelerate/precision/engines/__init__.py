"""Libraries that compute in 8-bit floating point, each behind the same small interface."""
