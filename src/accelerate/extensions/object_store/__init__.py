"""Checkpoints in object stores such as S3, by fsspec."""

from accelerate.extension import Spec

SPEC = Spec("object_store", storage="accelerate.extensions.object_store.object_store:ObjectStore")
