"""Threads that cannot be had, or that fail: an exception, and a process that goes on."""

from __future__ import annotations

import subprocess
import sys

from tests.ops.devices import unless_sanitized

PRELUDE = """
import os, resource, sys
import numpy as np
from quire.ops import Heads, Refused, Rope
from quire.ops.cpu import CpuOps

def limit(more):  # address space: of thread stacks and of arrays
    if more is None:
        return resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

def threads():
    return len(os.listdir("/proc/self/task"))

def works(ops):
    rows = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    w = ops.pack([(0, 512, 256, np.ones((512, 256), np.float32).view(np.uint8))])
    sums = ops.numpy(ops.linear(ops.array(rows), w))
    assert np.allclose(sums, rows.sum(1, keepdims=True), atol=1e-3)
"""


def python(code: str) -> str:
    """What another process prints; it must end by itself, and well."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@unless_sanitized
def test_threads_that_the_system_has_not_are_refused() -> None:
    """The message says how many there were; those are gone, and fewer can be had."""
    out = python("""
before = threads()
limit(64 << 20)
try:
    CpuOps(1000)
except Refused as error:
    print(error)
assert threads() == before
limit(None)
works(CpuOps(3))
""")
    assert out.startswith("threads=1000 could not be started: "), out
    assert 1 <= int(out.split(": ")[1].split()[0]) < 1000
    assert out.endswith("; pass fewer\n")


@unless_sanitized
def test_what_is_thrown_in_a_thread_reaches_the_caller() -> None:
    """A gigabyte for each thread cannot be had; the same threads compute again afterwards."""
    out = python(
        """
ops = CpuOps(4)
tokens, dims = 1 << 20, 256
heads = ops.heads(Heads(1, 1, dims, dims, 1.0), "f16", "f16", None, None, 1e-5)
rope = ops.rope(Rope(dims, np.ones(dims // 2), True))
pages, deltas = np.arange(8, dtype=np.int32), np.ones((8, tokens), np.int32)
for _ in range(20):
    limit(256 << 20)
    try:
        ops.rotate_pages(heads, rope, 0, 1 << 40, tokens, pages, deltas, np.zeros(1, np.int64))
    except MemoryError:
        print("no memory")
    limit(None)
    works(ops)
assert threads() == 4 + started
""".replace("ops = CpuOps(4)", "started = threads() - 1\nops = CpuOps(4)")
    )
    assert out == "no memory\n" * 20


def test_a_forked_process_has_no_threads_and_says_so() -> None:
    """Neither a call nor the end of the pool waits for threads that are the parent's."""
    out = python("""
ops = CpuOps(3)
works(ops)
if (child := os.fork()) == 0:
    try:
        works(ops)
    except RuntimeError as error:
        print(error, flush=True)
    del ops
    works(CpuOps(2))
    print("well", flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
works(ops)
""")
    assert out.startswith("this process was forked"), out
    assert out.endswith("well\n")
