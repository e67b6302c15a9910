"""Integrity checks of rounds, statistics of validations, and stop conditions."""
