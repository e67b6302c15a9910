"""`trainspan gate`: a candidate against a baseline.

- `gate_run`: the rollouts under both servers, until the test decides; `verdict` says what they mean.
- `power`: the fall that would have been found.
- `tripwires`: figures beside the verdict, from the store.
- `pages`: the result for a terminal, a pull request and a CI system.
"""
