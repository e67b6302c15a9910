"""The trial of each new version: tasks rolled out under it right after its swap, and the version before put back if it is worse.

`trials` is what the loop calls. `evidence` keeps the outcomes of the trial tasks under each version, `comparison` is the
statistical test, `sequential` the one of `trainspan gate` that may stop early, `verdict` the decision with its figures, and
`lineage` finds versions among the checkpoints and puts one back.
"""
