"""Builds one dataset: chunks of rollouts to rows and a manifest."""
