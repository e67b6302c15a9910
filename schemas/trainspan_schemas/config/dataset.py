"""Settings of the dataset: what is trained, and its credit."""

from dataclasses import dataclass
from typing import Literal

from trainspan_schemas.config.marks import Advanced

__all__ = ["DatasetSettings"]


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """`[dataset]`: stored spans in, transitions with credit out."""

    out: str | None = None
    """Folder of datasets, or a URL such as `s3://bucket/prefix`; default: `$TRAINSPAN_HOME/dataset`.

    A URL is of any store that fsspec knows; S3 needs `pip install 'trainspan[s3]'`."""
    engine: Literal["local", "ray"] = "local"
    """Where the dataset is computed: `local`, in this process, or `ray`, as tasks on the nodes of a Ray cluster (see `[ray]`).

    The bytes are the same. With `ray`, `out` must be a URL, or in a folder that all nodes share, and the stores must be at addresses
    that all nodes reach."""
    credit: str = "identical"
    """How a rollout's rewards are assigned to its calls: `identical`, `return_to_go`, `step`, `gigpo`, `rtmc`, `vine`,
    `per_agent`, or `module:function`.

    `vine` uses the values that `trainspan branch` measured."""
    baseline: str | None = None
    """Advantage baseline: `grpo`, `dr_grpo`, `rloo`, `batch`, `global`, `running`, `rae`, `none`, or `module:function`;
    default: `grpo` (`dr_grpo` with `rtmc` and `vine`), or `running` if no rollout has a task id."""
    reward: str | None = None
    """`module:function`, `file.py:function` or `rubric.toml` that rewards each stored rollout; default: the stored rewards count.

    A function is called with a `StoredRollout`."""
    status_rewards: str | None = None
    """Rewards of failed rollouts, such as `timeout=0,agent_error=-1`; default: these rollouts are dropped.

    `good` and `bad` are what people's labels are worth, 1 and 0 by default: `good=10,bad=-10` in the scale of such a judge."""
    reward_concurrency: Advanced[int] = 1
    """Maximum number of calls of `reward` in progress, in threads.

    Above 1 the function must be thread-safe, and it gains time only if it waits."""
    reward_timeout_s: Advanced[float] = 120.0
    """Seconds after which a call of `reward` is abandoned and its rollout dropped as `judge_error`."""
    reward_name: str = "reward"
    """Evaluation that is the reward; several as `correct=1,style=0.2,tools?=0.1`.

    The numbers are weights, and `?` marks one that a rollout may lack."""
    max_reward: Advanced[float] = 1e6
    """Rewards beyond this, in either direction, do not count: one would outweigh all others, or overflow.

    It holds for each score, and for the sums over a call and a rollout. A dataset drops such rollouts as `reward_out_of_range`, and
    a judge that gives such a score fails."""
    combine: Literal["sum", "gdpo"] = "sum"
    """How several rewards are combined: `sum` (add, then compare) or `gdpo` (compare each, then add).

    `gdpo` scales its sum by the batch."""
    air: str | None = None
    """Rewards of single calls from signals of the trace, such as `tool_error=-0.1,parse_error=-0.1`; default: none.

    The signals are `tool_error`, `parse_error`, `repeated_call`, and `output:PATTERN` for tool outputs that match a regular
    expression without a comma."""
    overlong: Literal["keep", "mask", "punish"] = "keep"
    """Calls that reach the length limit: `keep`, `mask` (do not train them) or `punish` (lower their reward)."""
    overlong_penalty: Advanced[float | None] = None
    """Amount that `punish` subtracts from the reward of such a call; default: 1."""
    gamma: float = 1.0
    """Discount per request for `return_to_go`, `gigpo` and `rtmc`; the choices of one request are one step."""
    group_over: Literal["rollouts", "turns", "calls"] = "rollouts"
    """What a call is compared with: the group's `rollouts`, its calls of the same turn (`turns`), or all of its `calls`.

    With `turns`, later calls are not compared with earlier ones, which have more reward to come. With `calls`, a rollout with
    more calls has more weight."""
    step_by: Advanced[Literal["turn", "agent"]] = "turn"
    """Calls that `step` compares within a group: those of the same `turn`, or of the same `agent`."""
    episode_weight: Advanced[float] = 1.0
    """Weight of the comparison of whole rollouts in `gigpo`."""
    state_weight: Advanced[float] = 1.0
    """Weight of the comparison of calls from the same state in `gigpo`."""
    agent_credit: str | None = None
    """Estimators for `per_agent`, such as `planner=rloo,kind:summary=return_to_go+grpo,*=rae`; default: `baseline` for all.

    `kind:NAME` stands for all calls of a kind, and comes before the agent's name."""
    agents: str | None = None
    """Comma-separated agents whose calls are trained, or kinds of calls as `kind:main`; default: all.

    Kinds are `main`, `sub_agent`, `summary`, `title` and `other` ([agents.md](agents.md#kinds-of-calls))."""
    policies: str | None = None
    """Comma-separated policies whose calls are trained; default: all."""
    choices: Advanced[Literal["used", "all"]] = "used"
    """Which of several answers to one request (n > 1) are trained: `used` (the agent continued with them) or `all`."""
    filter: str | None = None
    """`module:function(StoredRollout) -> bool` that selects the rollouts to train on; default: all."""
    split: str = "recorded"
    """Which tasks are for training: `recorded`, `all`, or a share such as 0.9.

    A share selects tasks by a hash of the task id."""
    admit: str | None = None
    """Comma-separated reasons that do not exclude a call: `unstated_sampling`, `unsigned`, `untrusted_reward`,
    `untrusted`, `title`; default: none.

    `unstated_sampling`: a client recorded the call, and its request does not state temperature, top_p, top_k, min_p,
    repetition_penalty and constraints. Admit it if the server's defaults change nothing.
    `unsigned`: the caller named a rollout without its runner's signature. Admit it if the policy server cannot have the
    runner's key.
    `untrusted_reward`: a process without the tokens rewarded a rollout that no runner began.
    `untrusted`: the agent's side recorded the call.
    `title`: the call asks for a conversation's title."""
    max_staleness: int | None = None
    """Drop calls whose version number is more than this below the newest; default: no limit.

    Numbers of refused and withdrawn versions count, too, because a dataset knows no checkpoints: `[train] max_staleness` counts
    updates."""
    max_tokens: int | None = None
    """Drop calls with more tokens in prompt and completion; default: no limit.

    Calls are never cut."""
    settle_s: Advanced[float] = 60.0
    """Seconds of silence after which an incomplete rollout counts as `unfinished`."""
    wait_s: float = 0.0
    """How long to wait for rollouts that are still arriving."""
    group_wait_s: Advanced[float] = 300.0
    """How long a task's group waits for rollouts that its runner has not finished.

    It is counted from the group's last activity; the group is then used as it is. The default is twice the runner's timeout
    plus a minute."""
    min_coverage: float = 0.5
    """Minimum share of calls that must be trainable; below it the command fails."""
    keep_zero_spread: Advanced[bool] = False
    """Keep groups whose rewards are all equal; their advantage is 0, less the mean of the batch with `combine = "gdpo"`."""
