"""Processes that raise, die or hang are errors, and the next world works again."""

import os
import time

import pytest
import torch.distributed as dist

from fsdp_tp.parity import Layout, RankError, WorkerDied, Workers


def _rank():
    return dist.get_rank(), dist.get_world_size()


def _items():
    for item in range(3):
        yield item * 10
    return dist.get_rank()


def _raise(exception):
    if dist.get_rank() == 1:
        raise exception
    dist.barrier()


def _does_not_fit():
    Layout(tensor=0)


def _users_mistake():
    raise ValueError("too many values to unpack")


def _die():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _hang():
    time.sleep(60)


def test_results_items_and_failures():
    with Workers(collective_timeout=60, call_timeout=60) as workers:
        assert workers.run(2, _rank) == [(0, 2), (1, 2)]
        found = []
        assert workers.run(2, _items, on_item=lambda rank, item: found.append((rank, item))) == [0, 1]
        assert sorted(found) == [(0, 0), (0, 10), (0, 20), (1, 0), (1, 10), (1, 20)]
        with pytest.raises(RankError, match="rank 1 of 2(.|\n)*KeyError: 'lost'") as error:
            workers.run(2, _raise, KeyError("lost"))
        assert error.value.sentence is None
        with pytest.raises(RankError) as error:
            workers.run(2, _does_not_fit)
        assert error.value.sentence == "layout: tensor=0 must be an integer of at least 1"
        with pytest.raises(RankError, match="too many values") as error:
            workers.run(2, _users_mistake)
        assert error.value.sentence is None, "where it happened matters"
        with pytest.raises(WorkerDied, match="rank 1 of 2 died .exit code 7."):
            workers.run(2, _die)
        assert workers.run(2, _rank) == [(0, 2), (1, 2)]
        workers._workers[1][0].kill()
        workers._workers[1][0].join()
        with pytest.raises(WorkerDied, match="rank 1 of 2 died"):
            workers.run(2, _rank)
        assert workers.run(3, _rank) == [(0, 3), (1, 3), (2, 3)]
        with pytest.raises(ValueError, match="must be importable by name"):
            workers.run(1, lambda: None)


def test_a_rank_that_hangs_is_an_error_within_the_time():
    with Workers(call_timeout=1.5) as workers, pytest.raises(WorkerDied, match="rank 0 of 1 did not answer within 2 s"):
        workers.run(1, _hang)
