"""Per-round metrics: records, alarms, trackers."""
