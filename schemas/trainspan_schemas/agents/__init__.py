"""Agents and functions of users: how settings name them, how they are called, the worker's messages, and agents without a name."""
