"""Fully sharded data parallel."""
