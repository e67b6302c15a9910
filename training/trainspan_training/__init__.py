"""Parquet of transitions → optimizer steps → checkpoint → publish.

Nothing heavy (torch, trl, pyarrow) is imported before a job is known to have work. In reading order:

- `session`: `train(job)`, one use of the trainer.
- `rounds/`: a round, from dataset to checkpoint.
- `data/`: Parquet to optimizer steps to micro-batches; NumPy only.
- `objective/`: micro-batch to loss; `grpo_trainer.TransitionGRPOTrainer` is TRL's trainer on logged transitions.
- `constraints/`: which tokens could come at each position of a constrained call.
- `model/`: weights in memory, and Adam's state.
- `checkpoints/`: weights on disk.
- `devices/`: the processes of a job.
- `metrics/`: figures of a round.
"""
