"""The options of `trainspan dataset`."""

from pathlib import Path
from typing import Annotated

import typer

# What is read, and where the dataset is written.
Store = Annotated[list[str] | None, typer.Option(help="Store path or grpc:// address; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="Folder of datasets.")]
Run = Annotated[str | None, typer.Option(help="Only rollouts of this run.")]
Round = Annotated[int | None, typer.Option(help="Only rollouts of this round; also the dataset's number.")]
AllowBehind = Annotated[
    bool, typer.Option("--allow-behind", help="Build although the store still loads what it acknowledged.")
]

# Rewards.
Reward = Annotated[
    str | None, typer.Option(help="module:function or file.py:function that re-rewards each stored rollout.")
]
RewardConcurrency = Annotated[int | None, typer.Option(help="Calls of --reward under way at once.")]
RewardTimeoutS = Annotated[float | None, typer.Option(help="Seconds for one call of --reward.")]
RewardName = Annotated[
    str | None, typer.Option(help="Evaluation that is the reward; several as correct=1,style=0.2,tools?=0.1.")
]
StatusRewards = Annotated[str | None, typer.Option(help="Rewards of rollouts that failed: timeout=0,agent_error=-1.")]
Combine = Annotated[str | None, typer.Option(help="Several rewards: sum, or gdpo (compare each, then add up).")]
Air = Annotated[
    str | None,
    typer.Option(help="Step rewards from the trace: tool_error=-0.1,parse_error=-0.1,repeated_call=-0.05."),
]
Overlong = Annotated[str | None, typer.Option(help="Calls that end by length: keep, mask or punish.")]
OverlongPenalty = Annotated[float | None, typer.Option(help="What punish takes from such a call's reward.")]

# Credit.
Credit = Annotated[
    str | None, typer.Option(help="identical, return_to_go, step, gigpo, per_agent, or module:function.")
]
Baseline = Annotated[
    str | None,
    typer.Option(help="grpo, dr_grpo, rloo, batch, global, running, rae, none, or module:function."),
]
Gamma = Annotated[float | None, typer.Option(help="Discount per call for return_to_go and gigpo.")]
GroupOver = Annotated[str | None, typer.Option(help="Statistics over rollouts or calls.")]
StepBy = Annotated[str | None, typer.Option(help="step compares calls of the same turn or agent.")]
AgentCredit = Annotated[str | None, typer.Option(help="For per_agent: planner=rloo,coder=return_to_go+grpo,*=rae.")]

# Which calls are trained.
Agents = Annotated[str | None, typer.Option(help="Train only these agents' calls.")]
Policies = Annotated[str | None, typer.Option(help="Train only these policies' calls.")]
Choices = Annotated[
    str | None, typer.Option(help="Of several answers to one request: train those that were used, or all.")
]
Filter = Annotated[str | None, typer.Option(help="module:function(StoredRollout) -> bool: which rollouts are trained.")]
Split = Annotated[str | None, typer.Option(help="recorded, all, or the share of tasks to train on.")]
Admit = Annotated[
    str | None,
    typer.Option(help="Do not leave calls out for these: unsigned, unstated_sampling, untrusted, untrusted_reward."),
]
MaxStaleness = Annotated[int | None, typer.Option(help="Drop calls that are more versions old.")]
MaxTokens = Annotated[int | None, typer.Option(help="Drop calls with more tokens.")]
MinCoverage = Annotated[float | None, typer.Option(help="Least share of trainable calls.")]
KeepZeroSpread = Annotated[
    bool | None, typer.Option("--keep-zero-spread", help="Keep groups without spread, advantage 0.")
]

# What is waited for.
WaitS = Annotated[float | None, typer.Option(help="Wait so long for rollouts that are still arriving.")]
SettleS = Annotated[float | None, typer.Option(help="Silence after which a rollout counts as unfinished.")]
GroupWaitS = Annotated[
    float | None, typer.Option(help="How long a task's group waits for rollouts that its runner still makes.")
]

# What is made and shown.
Again = Annotated[
    Path | None,
    typer.Option(help="Make this dataset again under --out, from its manifest alone, and compare the bytes."),
]
ShowMergeFailures = Annotated[
    bool,
    typer.Option(
        "--show-merge-failures", help="Show for each cause the tokens at which a call departs from the one before."
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Model whose tokenizer decodes these tokens [default: the one served].")
]
