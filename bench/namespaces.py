"""Several "hosts" on one machine: network namespaces whose links have a given rate.

    with Namespaces(2, rate="1gbit") as hosts:
        hosts.popen(0, ["ping", "-c", "1", hosts.address(1)]).wait()

Hosts share everything but the network: files, memory, the process table, and the hostname, so that whoever takes
the hostname for the identity of a host is found out. Needs root and iproute2; :func:`unavailable` says what is
missing. Everything goes when the block is left, also by an exception, SIGINT or SIGTERM; what a killed process left
behind goes when the next one comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_PREFIX = "fsdp_tp-"
_numbers = itertools.count()

# A receiver that prints the bytes a second of what one sender sends it, from the first byte to the last.
_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
connection, _ = server.accept()
buffer, total = bytearray(1 << 20), len(connection.recv(1))
began = time.perf_counter()
while count := connection.recv_into(buffer):
    total += count
print(total / (time.perf_counter() - began))
"""
_SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for _ in range(int(sys.argv[3])):
    connection.sendall(bytes(1 << 20))
"""


class Namespaces:
    """``count`` hosts; each has one link, of ``rate`` in each direction, as ``interface``.

    Two hosts are joined by a veth pair; more by a bridge, in a namespace of its own, so that nothing is ever made in
    the machine's own network.
    """

    interface = "eth0"

    def __init__(self, count: int, *, rate: str = "1gbit") -> None:
        if count < 2:
            raise ValueError(f"count={count} must be at least 2")
        self.count, self.rate = count, rate
        self._name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._hosts = [f"{self._name}-{index}" for index in range(count)]
        self._made: list[str] = []
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Namespaces:
        _remove(_abandoned())
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _exit)
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        _remove(self._made)
        for process in self._started:
            process.wait()
        self._made, self._started = [], []
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)

    def _build(self) -> None:
        for host in self._hosts:
            self._add(host)
        if self.count == 2:
            first, second = self._hosts
            _ip(f"link add {self.interface} netns {first} type veth peer name {self.interface} netns {second}")
        else:
            switch = f"{self._name}-switch"
            self._add(switch)
            _ip(f"-n {switch} link add bridge type bridge")
            _ip(f"-n {switch} link set bridge up")
            for index, host in enumerate(self._hosts):
                port = f"port{index}"
                _ip(f"-n {switch} link add {port} type veth peer name {self.interface} netns {host}")
                _ip(f"-n {switch} link set {port} master bridge up")
                self._shape(switch, port)
        for index, host in enumerate(self._hosts):
            _ip(f"-n {host} address add {self.address(index)}/24 dev {self.interface}")
            _ip(f"-n {host} link set lo up")
            self._shape(host, self.interface)
            self.link_up(index)

    def _add(self, name: str) -> None:
        self._made.append(name)
        _ip(f"netns add {name}")

    def _shape(self, name: str, device: str) -> None:
        # Measured: at 1gbit a plain socket gets 119 to 120 MB/s of payload, which is the rate less the headers. With a
        # burst of 64kb it gets 75 to 95, since a burst must last until the timer fires again; 1mb lets 10 % too much
        # through at 100mbit. With a queue of 5ms in place of 50 packets are dropped.
        _run("tc", f"-n {name} qdisc add dev {device} root tbf rate {self.rate} burst 256kb latency 50ms")

    def address(self, index: int) -> str:
        return f"10.0.0.{index + 1}"

    def path(self, index: int) -> str:
        """Of the namespace of host ``index``, for :func:`enter`."""
        return f"/run/netns/{self._hosts[index]}"

    def popen(
        self, index: int, command: Sequence[Any], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command in host ``index``, with ``env`` on top of this process's environment; gloo and NCCL are
        told the interface. It is killed at the end, with all that it has started."""
        interface = {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._hosts[index], *map(str, command)],
            env={**os.environ, **interface, **(env or {})},
            **options,
        )
        self._started.append(process)
        return process

    def torchrun(
        self, index: int, *arguments: Any, processes: int = 2, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """``torchrun arguments`` in host ``index``, as its part of one job of all hosts.

        Hosts that have one name, which says nothing about their addresses, must be told where the rendezvous is and
        which address is theirs.
        """
        command = (
            f"{sys.executable} -m torch.distributed.run --nnodes {self.count} --nproc-per-node {processes} "
            f"--rdzv-backend c10d --rdzv-id job --rdzv-endpoint {self.address(0)}:29500 "
            f"--rdzv-conf is_host={int(index == 0)} --local-addr {self.address(index)}"
        )
        return self.popen(index, [*command.split(), *arguments], {"OMP_NUM_THREADS": "1", **(env or {})}, **options)

    def link_down(self, index: int) -> None:
        """As if somebody pulled the cable of host ``index``: nothing arrives, nobody is told."""
        _ip(f"-n {self._hosts[index]} link set {self.interface} down")

    def link_up(self, index: int) -> None:
        _ip(f"-n {self._hosts[index]} link set {self.interface} up")

    def link_bytes(self, index: int) -> int:
        """Bytes that host ``index`` has sent and received over its link."""
        (link,) = json.loads(_ip(f"-n {self._hosts[index]} -s -j link show {self.interface}"))
        return sum(int(link["stats64"][direction]["bytes"]) for direction in ("rx", "tx"))

    def bytes_per_second(self, source: int = 0, target: int = 1, *, mebibytes: int = 64) -> float:
        """What a plain socket between two hosts gets through one direction of the link."""
        where = [self.address(target), "29999"]
        receive = self.popen(target, [sys.executable, "-S", "-c", _RECEIVE, *where], stdout=subprocess.PIPE, text=True)
        assert receive.stdout is not None
        receive.stdout.readline()
        self.popen(source, [sys.executable, "-S", "-c", _SEND, *where, mebibytes]).wait()
        printed, _ = receive.communicate()
        return float(printed)


def run_job(hosts: Namespaces, arguments: Sequence[Any]) -> None:
    """``torchrun arguments`` on all hosts; ends this process if it fails on one of them."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses without a name are worth a warning to c10d
    agents = [hosts.torchrun(host, *arguments, env=quiet) for host in range(hosts.count)]
    while any(agent.poll() is None for agent in agents) and not any(agent.poll() for agent in agents):
        time.sleep(0.1)
    if failed := [agent.returncode for agent in agents if agent.returncode]:
        sys.exit(f"torchrun of a host ended with {failed[0]}")


def enter(path: str) -> None:
    """Moves the calling process, which must not have other threads yet, into a host: cheaper than a new one that
    imports everything again. It is killed at the end, as others are there."""
    with open(path) as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = Namespaces.interface


@functools.cache
def unavailable(count: int = 2) -> str | None:
    """Why ``count`` hosts cannot be made here; None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (iproute2)"
    try:
        with Namespaces(count):
            return None
    except RuntimeError as error:
        return f"network namespaces are not allowed: {error}"


def _abandoned() -> list[str]:
    """The namespaces of processes that are gone."""
    found = []
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        try:
            os.kill(int(path.name.removeprefix(_PREFIX).split("-")[0]), 0)
        except ProcessLookupError:
            found.append(path.name)
        except (ValueError, PermissionError):
            continue
    return found


def _remove(names: Iterable[str]) -> None:
    """The namespaces, after all processes in them; devices go with them."""
    for name in names:
        with contextlib.suppress(RuntimeError):  # somebody else's cleaning, or it was not made yet
            while pids := _ip(f"netns pids {name}").split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            _ip(f"netns delete {name}")


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _ip(arguments: str) -> str:
    return _run("ip", arguments)


def _run(tool: str, arguments: str) -> str:
    done = subprocess.run([tool, *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {arguments}: {done.stderr.strip()}")
    return done.stdout
