"""The reference trainer: ``torchrun --nproc-per-node N -m fsdp_tp.train --help``."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fsdp_tp.train.config import TrainConfig, parse

__all__ = ["TrainConfig", "main", "parse"]


def main(arguments: list[str] | None = None) -> int:
    """Trains as the command line (or ``arguments``) says; returns the exit status.

    A setting that does not fit is one line on rank 0 and status 2, not a traceback of every rank.
    """
    try:
        config = parse(arguments)
        from fsdp_tp.train.loop import train

        train(config)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        # torchrun ends rank 0 as soon as another rank has failed: let its summary show the sentence too.
        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
