"""Parquet of transitions → optimizer steps → checkpoint → publish.

`session.train` is the entry; `trainer.TransitionGRPOTrainer` the TRL trainer; the modules between are pure and small.
Nothing heavy (torch, trl, pyarrow) is imported before a job is known to have work.
"""
