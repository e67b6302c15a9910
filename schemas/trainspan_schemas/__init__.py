"""Contracts between trainspan's processes: names, record types, file layouts and errors. Standard library only."""
