"""Turns rewards into advantages."""
