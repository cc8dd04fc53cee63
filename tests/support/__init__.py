"""Helpers of several tests: oracles, and ways to run a task in this process or in one that may be killed."""
