"""Parquet of transitions → optimizer steps → checkpoint → publish.

Nothing heavy (torch, trl, pyarrow) is imported until the job is known to have work. In reading order:

- `session`: `train(job)`, one trainer run; `dataset_queue` gives it the datasets.
- `rounds/`: a round, from dataset to checkpoint.
- `sft/`: `fine_tune(job)` trains on conversations instead; its result is a model to start from.
- `data/`: Parquet to optimizer steps to micro-batches; NumPy only.
- `objective/`: micro-batch to loss; `grpo_trainer.TransitionGRPOTrainer` is TRL's trainer on logged transitions.
- `constraints/`: the tokens allowed at each position of a constrained call.
- `model/`: weights in memory, and Adam's state.
- `checkpoints/`: weights on disk.
- `devices/`: the processes of a training job.
- `metrics/`: per-round metrics.
"""
