"""Comparing a table with the table that a pipeline has filled from it."""
