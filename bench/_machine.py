"""The machine a benchmark runs on: what it is, how fast it reads memory, who else is using it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_SOURCE = Path(__file__).with_name("_bandwidth.c")


class Bandwidth:
    """Streaming reads with a number of threads, by a small C program compiled for this machine."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._program, self._threads = folder / "bandwidth", threads
        flags = ["-O3", "-march=native", "-pthread"]
        command = ["cc", *flags, str(_SOURCE), "-o", str(self._program)]
        subprocess.run(command, check=True)

    def measure(self, n_bytes: int, passes: int = 20) -> float:
        """The best pass, in bytes per second, over a buffer of `n_bytes` read again and again.

        The buffer has the size of the weights, because a last-level cache that holds a part of
        them is a part of the limit too.
        """
        command = [str(self._program), str(self._threads), str(n_bytes), str(passes)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return max(float(line) for line in output.split())


class Quiet:
    """Measures while nobody else computes: waits for that, and repeats what was disturbed.

    A core taken away for a moment costs an engine whose threads spin at barriers far more than
    that moment, so a disturbed measurement says little. `patience` is how many seconds a whole
    run may spend on waiting and repeating; after it, disturbed measurements are kept and counted.
    """

    LIMIT = 0.05  # of the machine

    def __init__(self, patience: float) -> None:
        self.disturbed = 0
        self._left = patience

    def measure(self, own: list[int], once: Callable[[], T]) -> T:
        """What `once` returns; `own` are the running processes that belong to the benchmark."""
        while True:
            self._wait(own)
            watch = Watch(own)
            result = once()
            seconds, share = watch.read()
            if share <= self.LIMIT:
                return result
            self._left -= seconds
            if self._left <= 0:
                self.disturbed += 1
                return result

    def _wait(self, own: list[int]) -> None:
        while self._left > 0:
            watch = Watch(own)
            time.sleep(0.25)
            seconds, share = watch.read()
            if share <= self.LIMIT:
                return
            self._left -= seconds


class Watch:
    """Time since it was made, and the share of the machine that other programs took in it."""

    def __init__(self, own: list[int]) -> None:
        self._own = own
        self._start, self._others = time.monotonic(), self._others_now()

    def read(self) -> tuple[float, float]:
        """Seconds, and the others' share from 0 to 1."""
        seconds, others = time.monotonic() - self._start, self._others_now() - self._others
        return seconds, max(0.0, others / (seconds * (os.cpu_count() or 1)))

    def _others_now(self) -> float:
        """Processor seconds of all but this process, its ended children and those in `own`."""
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4]) - sum(map(cpu_seconds, self._own))


def cpu_seconds(pid: int) -> float:
    """Processor time that a running process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """The processor, as the kernel calls it, with the number of usable cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else os.uname().machine}, {len(os.sched_getaffinity(0))} cores"
