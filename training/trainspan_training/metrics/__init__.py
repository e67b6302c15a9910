"""Per-round metrics: records, alarms, trackers, curves."""
