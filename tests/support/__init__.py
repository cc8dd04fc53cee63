"""Helpers that several tests share: oracles, and ways to run a task in this process or in a process that may be killed."""
