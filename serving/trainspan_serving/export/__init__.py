"""Sends call spans to the collector, through a bounded queue in memory and on disk."""
