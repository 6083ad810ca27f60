"""The hosts themselves. If these fail, look in bench/namespaces.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.namespaces import Namespaces, enter, unavailable

pytestmark = pytest.mark.skipif(unavailable(3) is not None, reason=str(unavailable(3)))

# Prints the process that it has started in a host, then waits to be killed.
_HOLDER = """
import time
from bench.namespaces import Namespaces
with Namespaces(3) as hosts:
    print(hosts.popen(2, ["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""


def _made_by(pid: int) -> list[Path]:
    return list(Path("/run/netns").glob(f"fsdp_tp-{pid}-*"))


def _is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_whoever_made_it(how: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert holder.stdout is not None
    inside = int(holder.stdout.readline())
    assert len(_made_by(holder.pid)) == 4  # with the switch
    holder.send_signal(how)
    holder.wait()
    holder.stdout.close()
    if how == signal.SIGKILL:
        assert len(_made_by(holder.pid)) == 4
        with Namespaces(2):
            assert _made_by(holder.pid) == []
    assert _made_by(holder.pid) == []
    deadline = time.monotonic() + 10
    while _is_running(inside) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_running(inside)


def test_an_exception_leaves_nothing() -> None:
    hosts = Namespaces(2)
    with pytest.raises(FileNotFoundError), hosts:
        enter(hosts.path(1) + "-of-another-name")
    assert _made_by(os.getpid()) == []


def test_links_have_the_rate_count_bytes_and_go_down() -> None:
    with Namespaces(3, rate="100mbit") as hosts:
        before = hosts.link_bytes(2)
        rate = hosts.bytes_per_second(0, 2, mebibytes=8)
        # 12.5 MB/s less headers (4 %), more by a burst at the start; a busy machine may be slower.
        assert 9e6 < rate < 13e6
        assert 8 << 20 < hosts.link_bytes(2) - before < 1.05 * (8 << 20)
        assert _reaches(hosts)
        hosts.link_down(1)
        assert not _reaches(hosts)
        hosts.link_up(1)
        assert _reaches(hosts)


def _reaches(hosts: Namespaces) -> bool:
    """Whether host 1 answers host 0: nobody listens there, which it says."""
    connect = f"import socket; socket.create_connection(('{hosts.address(1)}', 1), timeout=1)"
    command = [sys.executable, "-S", "-c", connect]
    _, errors = hosts.popen(0, command, stderr=subprocess.PIPE, text=True).communicate()
    return "ConnectionRefusedError" in errors


def test_hosts_have_one_name() -> None:
    """So that whatever takes the hostname for the identity of a host fails in tests that use them."""
    with Namespaces(2) as hosts:
        names = [
            hosts.popen(host, ["uname", "-n"], stdout=subprocess.PIPE, text=True).communicate()[0] for host in range(2)
        ]
    assert names == [os.uname().nodename + "\n"] * 2
