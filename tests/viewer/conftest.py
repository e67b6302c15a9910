"""Stores and datasets of the viewer's tests: those of processing's tests."""

from tests.processing.conftest import bench, collectors, run_id

__all__ = ["bench", "collectors", "run_id"]
