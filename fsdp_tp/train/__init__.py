"""The reference trainer: ``torchrun --nproc-per-node N -m fsdp_tp.train --help``."""

from __future__ import annotations

import logging
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
    from fsdp_tp.train.loop import prepare, run

    logging.basicConfig(format="%(message)s")
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("fsdp_tp").setLevel(logging.INFO)  # among others what collectives go over
    try:
        config = parse(arguments)
        job = prepare(config)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        # torchrun ends rank 0 as soon as another rank has failed: let its summary show the sentence too.
        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
        _end()
        return 2
    run(config, job)
    _end()
    return 0


def _end() -> None:
    # Not after other errors: there a peer may be stuck in a collective, and leaving it could wait for that.
    if dist.is_initialized():
        dist.destroy_process_group()
