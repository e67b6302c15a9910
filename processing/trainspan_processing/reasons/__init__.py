"""Finds the reason why a call is not trained: one named, counted reason per call."""
