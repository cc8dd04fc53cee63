"""Triggers run as in a triggerer: built from their serialized form, on an event loop that must not be blocked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

from airflow.sdk.module_loading import import_string


def again(trigger: Any) -> Any:
    """Return the trigger that a triggerer builds from the serialized one."""
    path, kwargs = json.loads(json.dumps(trigger.serialize()))
    made = import_string(path)(**kwargs)
    assert made.serialize() == trigger.serialize()
    return made


async def first(trigger: Any, seconds: float = 600.0) -> Any:
    """The payload of its first event, or None when it ends without one."""
    events = trigger.run()
    try:
        event = await asyncio.wait_for(anext(events, None), seconds)
        return None if event is None else event.payload
    finally:
        await events.aclose()


def fire(trigger: Any, seconds: float = 600.0) -> Any:
    """Run :func:`first` from a test that is not asynchronous."""
    return asyncio.run(first(again(trigger), seconds))


async def longest_pause(stop: asyncio.Event) -> float:
    """For how many seconds, at most, the event loop stood still while other threads did not: a machine that has too much to do
    stops them all."""
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            time.sleep(0.01)
            ticks += 1

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    longest, last = 0, ticks
    while not stop.is_set():
        await asyncio.sleep(0.01)
        longest, last = max(longest, ticks - last), ticks
    await asyncio.to_thread(ticker.join)
    return longest * 0.01


class Store:
    """An asset's state store that outlives its triggers, and takes JSON only."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    async def aget(self, key: str, default: Any = None) -> Any:
        return json.loads(self.values[key]) if key in self.values else default

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = json.dumps(value, allow_nan=False)
