"""Judges: what gives rollouts their rewards.

In reading order:

- `judge`: calls a judge, and checks what it returns; `choice` finds the one that a setting names.
- `named`: deterministic judges by name, such as `exact:answer`; `answers` finds the answer in a result, `comparisons` compares.
- `rubric`: the TOML file of a judge model; `rubric_judge` asks it about one rollout, `comparing` about a group, and
  `chat_model` is its endpoint with the cache.
- `graders`: judges in the JSON format of OpenAI's reinforcement fine-tuning.
- `child`: tries patterns, schemas, queries, tests and graders in a process of its own, whose program is `sandbox`.
"""
