"""Dispatched batches: rank 0 reads, and sends each rank its part."""

from accelerate.extension import Spec

SPEC = Spec("dispatch", dispatch="accelerate.extensions.dispatch.reading:RankZeroReads")
