"""Ranks that die, stop, or never come. If these fail, look in fsdp_tp/comm/rendezvous.py and kernels/torch/."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdp_tp.comm import rendezvous
from tests.comm.processes import Job
from tests.comm.test_backend_programs import _counts


def _asynchronous(x):
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    work.wait()


_OPERATIONS = {"collective": dist.all_reduce, "asynchronous": _asynchronous, "message": lambda x: dist.recv(x, 1)}


def _until_it_fails(way, how):
    """Rank 1 ends or stops itself; what the others are told, after how long, and what is left once they are done."""
    alone = _counts()
    rank, x = dist.get_rank(), torch.ones(300_000)
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), how)
        time.sleep(60)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        _OPERATIONS[way](x)
    took = time.monotonic() - started
    dist.destroy_process_group()
    now = _counts()
    return str(caught.value), took, (now[0] < alone[0] or now[0] == 1, now[1], now[2] <= alone[2])


@pytest.mark.parametrize(
    ("way", "how", "operation"),
    [
        ("collective", signal.SIGKILL, "all_reduce"),
        ("asynchronous", signal.SIGKILL, "all_reduce"),
        ("message", signal.SIGKILL, "recv"),
        ("collective", signal.SIGSTOP, "all_reduce"),
        ("message", signal.SIGSTOP, "recv"),
    ],
)
def test_the_others_are_told_which_rank_ended_or_stopped(way, how, operation):
    timeout = 2
    before = set(os.listdir("/dev/shm"))
    results = Job(3, _until_it_fails, way, how, timeout=timeout if how == signal.SIGSTOP else 30).results(but=1)
    for message, took, left in (results[0], results[2]):
        assert f"{operation}: " in message
        assert "rank 1 (process " in message
        assert took < timeout + 5
        assert left[1:] == (0, True)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("fsdp_tp")]


def _sums():
    x = torch.zeros(1000)
    for step in range(200):
        y = torch.full_like(x, step + dist.get_rank())
        dist.all_reduce(y)
        x += y
    return x[0].item()


def test_two_jobs_at_once_do_not_meet():
    jobs = [Job(2, _sums), Job(2, _sums)]
    expected = float(sum(2 * step + 1 for step in range(200)))
    assert [job.results() for job in jobs] == [[expected] * 2] * 2


def _mismatched():
    os.environ["FSDP_TP_DEBUG"] = "1"
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    return str(caught.value)


def test_debugging_finds_different_calls():
    for message in Job(2, _mismatched).results():
        assert "rank 0 all_reduce of 3 float32 (sum)" in message
        assert "rank 1 all_reduce of 4 float32 (sum)" in message


class _Native:
    """The compiled module, without processes."""

    def __init__(self, host="here", broken=()):
        self._host, self._broken, self.unlinked = host, broken, 0
        self.Segment = self

    def host(self):
        return self._host

    def create(self, size, named):
        self.handle = "named" if named else "memfd"
        return self

    def attach(self, handle):
        if handle in self._broken:
            raise RuntimeError(f"{handle} is out of reach")
        self.handle = handle
        return self

    def unlink(self):
        self.unlinked += 1


def _meet(natives, size=None, timeout=5.0, members=()):
    """What each rank concludes; exceptions too."""
    store, results = dist.HashStore(), {}
    size = size or len(natives)

    def rank(number, native):
        meeting = rendezvous.Meeting(
            native, store, number, size, timedelta(seconds=timeout), list(members), "the group"
        )
        try:
            results[number] = meeting.segment(meeting.hosts())
        except RuntimeError as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=each) for each in enumerate(natives)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(natives))]


def test_ranks_of_one_host_share_a_segment():
    natives = [_Native(), _Native(), _Native()]
    assert _meet(natives) == natives
    assert {native.handle for native in natives} == {"memfd"}


def test_a_rank_that_cannot_attach_makes_all_try_the_named_kind():
    natives = [_Native(), _Native(broken=["memfd"]), _Native()]
    assert _meet(natives) == natives
    assert {native.handle for native in natives} == {"named"}
    assert natives[0].unlinked == 1


def test_where_no_kind_works_all_are_told_the_same():
    reasons = _meet([_Native(), _Native(), _Native(broken=["memfd", "named"])], members=[4, 5, 6])
    assert reasons == ["rank 2 (global rank 6): named is out of reach"] * 3
    # Also those of other hosts, though memory does for them.
    natives = [_Native(), _Native("there"), _Native(broken=["memfd", "named"]), _Native("there")]
    assert _meet(natives) == ["rank 2: named is out of reach"] * 4


def test_each_host_has_a_segment_of_its_own():
    natives = [_Native(), _Native("there"), _Native("alone"), _Native(), _Native("there")]
    segments = _meet(natives)
    assert segments == [natives[0], natives[1], None, natives[3], natives[4]]


def test_a_rank_that_never_comes_is_named():
    errors = _meet([_Native(), _Native()], size=3, timeout=0.3)
    for error in errors:
        assert isinstance(error, dist.DistBackendError)
        assert "rank 2 of 3 did not come to group the group within 0.3 s" in str(error)
