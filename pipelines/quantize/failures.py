"""What a quantizer library raises, told apart: a failure that would come again, or a machine that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.errors import StageFailed, TransientFailure

LIBRARY_ERRORS = (
    AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@contextmanager
def library_failures(library: str, checkpoint: str) -> Iterator[None]:
    """Turn a library's exceptions into one sentence.

    Raises:
        TransientFailure: torch could not get memory, of the machine or the accelerator.
        StageFailed: anything else the library gave up on.
    """
    import torch

    try:
        yield
    except LIBRARY_ERRORS as error:
        said = f"{library} could not quantize {checkpoint}: {type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
            raise TransientFailure(said) from error
        raise StageFailed(said) from error
