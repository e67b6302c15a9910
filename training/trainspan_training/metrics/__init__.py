"""Figures of a round: records, alarms, trackers, curves."""
