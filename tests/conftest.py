import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests import ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _shared_workers() -> Iterator[None]:
    gc.freeze()  # what is imported by now: the search for optimizers goes through the rest, a few times a test
    yield
    ranks.stop()


@pytest.fixture
def one_process() -> Iterator[None]:
    """A world of this process alone, ended afterwards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
