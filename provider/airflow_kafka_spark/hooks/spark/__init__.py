"""Spark sessions: the hook, jars, health, and faster starts. Import from the modules; this file contains no code."""
