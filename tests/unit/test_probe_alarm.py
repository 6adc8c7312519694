"""The timer that due times are kept by."""

from __future__ import annotations

import asyncio
import time

import pytest

from pipelines.probe import alarm


@pytest.mark.parametrize("platform", ["linux", "elsewhere"])
def test_it_rings_once_at_its_time(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's timer or by the loop's: never early, once, and at the time it was set to last."""
    monkeypatch.setattr(alarm.sys, "platform", platform)
    rung: list[float] = []

    async def wait() -> float:
        with alarm.Alarm(lambda: rung.append(time.monotonic())) as timer:
            timer.set(30.0)
            set_s = time.monotonic()
            timer.set(0.02)
            while not rung:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
        return set_s

    set_s = asyncio.run(wait())
    assert len(rung) == 1
    assert rung[0] - set_s >= 0.019


@pytest.mark.skipif(not alarm.sys.platform.startswith("linux"), reason="the kernel's timer is Linux's")
def test_it_is_finer_than_a_millisecond() -> None:
    """Of waits of a third of a millisecond the shortest takes less than one, which a loop's own timer cannot do."""

    async def shortest() -> float:
        due, took = asyncio.Event(), []
        with alarm.Alarm(due.set) as timer:
            for _ in range(50):
                due.clear()
                began_s = time.monotonic()
                timer.set(0.0003)
                await due.wait()
                took.append(time.monotonic() - began_s)
        return min(took)

    assert 0.0003 <= asyncio.run(shortest()) < 0.001
