"""The process itself: metrics, memory, threads, child processes."""
