"""Runs compared with a reference run on held-out tasks: how much of its success they reach, for how many tokens and at what cost."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainspan_loop.clients.store import rows
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.run_records import evaluations_in
from trainspan_schemas.errors import UsageError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.home import runs_dir
from trainspan_schemas.intervals import MOST_LEFT_OUT, RewardEstimate, ratio_interval
from trainspan_schemas.telemetry.keys import GEN_AI_INPUT_TOKENS, GEN_AI_OUTPUT_TOKENS, LABEL, ROLLOUT_JUDGE

__all__ = ["HeldOutRun", "Price", "Tokens", "compare_with_reference", "held_out_runs"]


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens, in any currency."""

    prompt: float
    completion: float

    @classmethod
    def parse(cls, text: str) -> "Price":
        """Parses `2.5/10`. Raises UsageError."""
        try:
            prompt, completion = (float(part) for part in text.split("/"))
        except ValueError:
            prompt = completion = -1.0
        if not (0 <= prompt < 1e9 and 0 <= completion < 1e9):
            raise UsageError(
                f"--price …={text}: write the prices of a million prompt and completion tokens, such as 2.5/10"
            )
        return cls(prompt, completion)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of all calls of some rollouts."""

    prompt: int
    completion: int

    def cost(self, price: Price) -> float:
        return (self.prompt * price.prompt + self.completion * price.completion) / 1e6


@dataclass(frozen=True, slots=True)
class HeldOutRun:
    """The rollouts of a loop's last validation, or those of held-out tasks in the newest round of another run that has some."""

    run_id: str
    round: int
    judge: str | None
    rewards: Mapping[str, Sequence[float | None]]
    """Task → the rewards of its rollouts; None for a rollout without one."""
    tokens: Mapping[str, Sequence[Tokens | None]]
    """Task → the tokens of its rollouts, None for a rollout whose calls were recorded without them."""
    n_labeled: int = 0
    """Rollouts whose reward is a person's label, 1 or 0."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A run on the tasks that the reference has, too."""

    run_id: str
    round: int
    success: RewardEstimate
    share: float | None
    """Of the reference's mean; None for the reference itself, and if `no_share` says why."""
    share_interval: tuple[float, float | None] | None
    """95 %; the upper end is None if it is not bounded."""
    tokens: Tokens | None
    """Of all its rollouts; None if those of some were not recorded."""
    n_without_tokens: int
    per_success: float | None
    """Tokens of prompt and completion for each unit of reward."""
    cost_per_success: float | None
    tasks_left_out: int
    """Tasks of this run that the reference lacks."""
    no_share: str | None = None
    """Why there is no share."""


def held_out_runs(stores: Sequence[str], run_ids: Sequence[str]) -> list[HeldOutRun]:
    """Reads the runs. Raises UsageError if one has no held-out rollouts, or they are of several judges; StoreError."""
    return [_held_out_run(stores, run_id) for run_id in run_ids]


def _held_out_run(stores: Sequence[str], run_id: str) -> HeldOutRun:
    quoted = run_id.replace("'", "''")
    where = f"run_id = '{quoted}' AND split = 'val' AND NOT untrusted{_of_last_validation(run_id)}"
    newest = [
        row["round"]
        for store in stores
        for row in rows(store, f"SELECT max(round) AS round FROM rollouts WHERE {where}")
    ]
    round_ = max((round_ for round_ in newest if round_ is not None), default=None)
    if round_ is None:
        raise UsageError(
            f"run {run_id} has no rollouts of held-out tasks in the store: make some with trainspan rollout --run {run_id} --split val"
        )
    of_round = f"SELECT * FROM rollouts WHERE {where} AND round = {round_:d}"
    rewards: dict[str, dict[str, tuple[int, float | None]]] = defaultdict(dict)
    tokens: dict[str, Tokens | None] = {}
    judges: set[str | None] = set()
    labeled: set[str] = set()
    for store in stores:
        for row in rows(store, f"SELECT rollout_id, attempt, task_id, reward FROM ({of_round}) ORDER BY attempt"):
            rewards[str(row["task_id"])][row["rollout_id"]] = row["attempt"], row["reward"]
        judges |= {row["judge"] for row in rows(store, _JUDGES.format(rollouts=of_round))}
        labeled |= {row["rollout_id"] for row in rows(store, _LABELED.format(rollouts=of_round))}
        tokens |= {row["rollout_id"]: _tokens(row) for row in rows(store, _TOKENS.format(rollouts=of_round))}
    if len(judges) > 1:
        raise UsageError(
            f"run {run_id} was judged by {', '.join(sorted(map(str, judges)))}: their rewards are not one measure"
        )
    return HeldOutRun(
        run_id,
        round_,
        next(iter(judges), None),
        {task: [reward for _, reward in rollouts.values()] for task, rollouts in rewards.items()},
        {task: [tokens.get(rollout) for rollout in rollouts] for task, rollouts in rewards.items()},
        len(labeled),
    )


def _of_last_validation(run_id: str) -> str:
    """The condition for it in SQL; empty if no loop here made the run.

    The hard probe, and validations that were interrupted or came before in the round, have the same run, round and split.
    """
    folder = runs_dir() / run_id
    validations = evaluations_in(RunFolder(folder).records(), "validation") if (folder / "run.json").exists() else []
    if not validations:
        return ""
    last = validations[-1]
    return f" AND round = {last['round']:d} AND start_ns BETWEEN {last['began_ns']:d} AND {last['ended_ns']:d}"


def _tokens(row: JsonObject) -> Tokens | None:
    if row["prompt"] is None or row["completion"] is None:
        return None
    return Tokens(int(row["prompt"]), int(row["completion"]))


_JUDGES = f"""SELECT DISTINCT json_extract_string(s.attributes, '$."{ROLLOUT_JUDGE}"') AS judge
    FROM spans s JOIN ({{rollouts}}) r ON s.rollout_id = r.rollout_id AND s.trace_id = r.trace_id
    WHERE json_extract_string(s.attributes, '$."{ROLLOUT_JUDGE}"') IS NOT NULL"""

_LABELED = f"""SELECT rollout_id FROM evaluations
    WHERE source = '{LABEL}' AND name = '{LABEL}' AND span_id IS NULL AND NOT coalesce(untrusted, false)
        AND rollout_id IN (SELECT rollout_id FROM ({{rollouts}}))
    GROUP BY rollout_id HAVING arg_max(score IS NOT NULL, time_ns)"""

_TOKENS = f"""WITH RECURSIVE chosen AS MATERIALIZED (SELECT DISTINCT rollout_id FROM ({{rollouts}})),
served AS (
    SELECT rollout_id, max(len(prompt_ids)) AS prompt, sum(len(completion_ids)) AS completion
    FROM calls JOIN chosen USING (rollout_id)
    GROUP BY rollout_id, attempt, call_index, start_ns
),
stated AS MATERIALIZED (
    SELECT s.rollout_id, s.trace_id, s.span_id, s.parent_span_id,
        TRY_CAST(json_extract_string(s.attributes, '$."{GEN_AI_INPUT_TOKENS}"') AS BIGINT) AS prompt,
        TRY_CAST(json_extract_string(s.attributes, '$."{GEN_AI_OUTPUT_TOKENS}"') AS BIGINT) AS completion
    FROM spans s JOIN chosen USING (rollout_id)
    WHERE contains(s.attributes, '{GEN_AI_OUTPUT_TOKENS}') AND rollout_id NOT IN (SELECT rollout_id FROM served)
),
above AS (
    SELECT trace_id, parent_span_id AS span_id FROM stated
    UNION
    SELECT a.trace_id, s.parent_span_id FROM above a JOIN spans s ON s.trace_id = a.trace_id AND s.span_id = a.span_id
),
counted AS (
    SELECT rollout_id, prompt, completion FROM served
    UNION ALL
    SELECT rollout_id, prompt, completion FROM stated ANTI JOIN above USING (trace_id, span_id)
)
SELECT rollout_id, sum(prompt) AS prompt, sum(completion) AS completion FROM counted GROUP BY rollout_id"""
"""The policy server's tokens of each rollout, else those that clients state: spans within spans that state some are one call."""


def compare_with_reference(
    reference: HeldOutRun, runs: Sequence[HeldOutRun], prices: Mapping[str, Price]
) -> list[Compared]:
    """The reference and the runs, in this order, each on the tasks that it shares with the reference.

    Raises UsageError if a run shares no task with it, was judged by another judge, or mixes people's labels with rewards of another
    scale.
    """
    compared = []
    for run in (reference, *runs):
        tasks = [task for task in run.rewards if task in reference.rewards]
        if not tasks:
            raise UsageError(f"runs {run.run_id} and {reference.run_id} have no held-out task in common")
        if run.judge != reference.judge:
            raise UsageError(
                f"run {run.run_id} was judged by {run.judge}, and {reference.run_id} by {reference.judge}: judge both by the same"
            )
        _check_scale(run, reference)
        compared.append(_compared(run, reference, tasks, prices.get(run.run_id)))
    return compared


def _check_scale(run: HeldOutRun, reference: HeldOutRun) -> None:
    """Raises UsageError if labels, which are 1 or 0, would be compared with rewards of another scale."""
    both = (run, reference)
    n_labeled = sum(one.n_labeled for one in ({one.run_id: one for one in both}).values())
    rewards = (reward for one in both for each in one.rewards.values() for reward in each)
    if n_labeled and any(reward is not None and not 0 <= reward <= 1 for reward in rewards):
        names = " and ".join(dict.fromkeys(one.run_id for one in both))
        raise UsageError(
            f"{n_labeled} held-out rollouts of {names} are labeled by people, with 1 or 0, and other rewards are not within 0 and 1: "
            "take the labels back, or judge within 0 and 1"
        )


def _compared(run: HeldOutRun, reference: HeldOutRun, tasks: Sequence[str], price: Price | None) -> Compared:
    success = RewardEstimate.of(run.rewards[task] for task in tasks)
    other = RewardEstimate.of(reference.rewards[task] for task in tasks)
    share, interval, no_share = None, None, None
    if run is not reference:
        no_share = _no_share(run, success, reference, other)
    if run is not reference and no_share is None:
        share, interval = success.mean / other.mean, ratio_interval(success, other)
    recorded = [tokens for task in tasks for tokens in run.tokens[task]]
    known = [tokens for tokens in recorded if tokens is not None]
    n_unknown = len(recorded) - len(known)
    total = Tokens(sum(one.prompt for one in known), sum(one.completion for one in known)) if not n_unknown else None
    earned = sum(reward for task in tasks for reward in run.rewards[task] if reward is not None)
    return Compared(
        run_id=run.run_id,
        round=run.round,
        success=success,
        share=share,
        share_interval=interval,
        tokens=total,
        n_without_tokens=n_unknown,
        per_success=(total.prompt + total.completion) / earned if total and earned > 0 else None,
        cost_per_success=total.cost(price) / earned if total and price and earned > 0 else None,
        tasks_left_out=len(run.rewards) - len(tasks),
        no_share=no_share,
    )


def _no_share(run: HeldOutRun, success: RewardEstimate, reference: HeldOutRun, other: RewardEstimate) -> str | None:
    """Why the means of the two have no ratio that says something."""
    for name, estimate in ((run.run_id, success), (reference.run_id, other)):
        if not estimate.stands:
            left_out = f"{estimate.left_out} of {estimate.n_rollouts} rollouts of {name} have no reward"
            return f"{left_out}, more than {MOST_LEFT_OUT:.0%}, so the mean of the others says little"
    return None if other.mean > 0 else f"the mean reward of {reference.run_id} is not positive"
