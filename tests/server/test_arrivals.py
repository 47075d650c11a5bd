"""Requests that come together begin together, and nobody waits for long."""

from __future__ import annotations

import asyncio

import pytest

from quire.server import arrivals
from quire.server.arrivals import Arrivals


async def arrive(gate: Arrivals, after: float, reads: float, told: list[str]) -> None:
    """Comes, reads for a while, and begins with the others."""
    await asyncio.sleep(after)
    with gate.coming():
        await asyncio.sleep(reads)
    told.append("here")
    await gate.gathered()
    told.append("begins")


def test_who_comes_alone_waits_for_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MOMENT_S", 60.0)
    monkeypatch.setattr(arrivals, "PAUSE_S", 60.0)
    asyncio.run(asyncio.wait_for(arrive(Arrivals(), 0, 0, []), 5))


def test_who_is_about_to_be_read_is_waited_for() -> None:
    async def soon(gate: Arrivals, told: list[str]) -> None:
        for _ in range(4):  # of the event loop's turns: it is accepted, read, understood
            await asyncio.sleep(0)
        await arrive(gate, 0, 0.005, told)

    async def both() -> list[str]:
        gate, told = Arrivals(), []
        await asyncio.gather(arrive(gate, 0, 0, told), soon(gate, told))
        return told

    assert asyncio.run(both()) == ["here", "here", "begins", "begins"]


def test_those_who_come_together_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MOMENT_S", 5.0)
    monkeypatch.setattr(arrivals, "PAUSE_S", 0.2)

    async def many() -> list[str]:
        gate, told = Arrivals(), []
        # One in the pause, which is three times as long as they are apart.
        times = [(0, 0.04), (0.04, 0.04), (0.08, 0.04), (0.16, 0.01)]
        await asyncio.gather(*(arrive(gate, *both, told) for both in times))
        return told

    assert asyncio.run(many()) == ["here"] * 4 + ["begins"] * 4


def test_who_come_quickly_wait_for_a_short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MOMENT_S", 60.0)
    monkeypatch.setattr(arrivals, "PAUSE_S", 60.0)

    async def several() -> None:
        gate = Arrivals()
        await asyncio.gather(*(arrive(gate, 0.001 * i, 0.005, []) for i in range(4)))

    asyncio.run(asyncio.wait_for(several(), 5))


def test_nobody_waits_for_long() -> None:
    async def slow() -> None:
        gate, told = Arrivals(), []
        reads = asyncio.create_task(arrive(gate, 0, 60, told))
        await asyncio.sleep(0)
        await asyncio.wait_for(arrive(gate, 0, 0, told), 5)
        assert told == ["here", "begins"]
        reads.cancel()

    asyncio.run(slow())


def test_who_leaves_meanwhile_holds_nobody_up() -> None:
    async def leaving() -> list[str]:
        gate, told = Arrivals(), []
        first, second, slow = (
            asyncio.create_task(arrive(gate, 0, reads, told)) for reads in (0, 0, 0.01)
        )
        await asyncio.sleep(0.005)
        first.cancel()
        slow.cancel()
        await asyncio.wait_for(second, 5)
        return told

    assert asyncio.run(leaving()).count("begins") == 1
