"""Where the rollouts of the loop's rounds come from, and how far they run ahead of training.

`sampler` is the interface that the loop uses and `choice` picks the implementation: `round_sampler` collects the rollouts of
one round after another, `stream_sampler` runs rollouts all the time, and `task_feed` gives tasks to its runner.
`live_sampler` takes the rollouts of agents that others run.
"""
