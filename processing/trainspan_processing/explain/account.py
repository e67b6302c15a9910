"""The explanation of one rollout: plain values, ready to be printed, drawn or serialized."""

from dataclasses import asdict, dataclass, field

from trainspan_processing.branches.stored_branches import StoredBranch
from trainspan_processing.read.measurements import Measurement
from trainspan_processing.reasons.missing_calls import Lack
from trainspan_processing.text.dialects import Message
from trainspan_schemas.artifacts.branches import BranchOrigin

__all__ = [
    "BranchAccount",
    "CallAccount",
    "CreditAccount",
    "EdgeAccount",
    "ForeignAccount",
    "GroupMember",
    "RolloutAccount",
    "ToolAccount",
    "UntrainedAccount",
]


@dataclass(frozen=True, slots=True)
class CallAccount:
    """One model call: P prompt tokens, C completion tokens. The defaults are those of a call of which nothing is derived."""

    index: int
    """Its number in the rollout: the call index, or the position if several choices of a request share one."""
    agent: str | None
    turn: int
    """Position among its agent's calls, from 0."""
    span_id: str
    policy_name: str | None
    policy_version: int | None
    temperature: float | None
    finish_reason: str | None
    start_s: float
    """Seconds since the rollout began."""
    seconds: float | None
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    reason: str | None
    """Why it is not trained; None if it is."""
    step_reward: float | None = None
    """The weighted sum of its own rewards."""
    value: float | None = None
    """Its value by the credit rule."""
    advantage: float | None = None
    segment: int | None = None
    """Its row of the merged rollout; None if it is not trained."""
    prefix_len: int = 0
    """Prompt tokens that earlier calls of the segment already contain."""
    continues: int | None = None
    """Index of the call whose tokens are that prefix."""
    broken: str | None = None
    """Why it does not continue its agent's previous call; None if it does, or if there is no previous call."""
    messages: list[Message] = field(default_factory=list)
    """The request, as the client's instrumentation recorded it; may be empty."""
    answer: Message | None = None
    prompt_text: str | None = None
    """Text of `prompt_ids[prefix_len:]`; None without a tokenizer."""
    pieces: list[str] | None = None
    """(C,) text added by each completion token; None without a tokenizer, or if not asked for."""
    measured: list[Measurement] = field(default_factory=list)
    """What branches measured, the newest run first; empty if nothing, or if not asked for."""
    kind: str = "main"
    """What it is for, such as `main` or `summary` (agents/call_kinds.py)."""
    kind_rule: str = ""
    """What showed its kind."""


@dataclass(frozen=True, slots=True)
class ForeignAccount:
    """A model call that only a client recorded, or one without recorded tokens; mostly calls of other models."""

    model: str | None
    agent: str | None
    start_s: float
    seconds: float | None
    reason: str
    """Why it is not trained."""
    messages: list[Message]
    answer: Message | None


@dataclass(frozen=True, slots=True)
class UntrainedAccount:
    """The calls that are not trained for one reason."""

    reason: str
    calls: list[int]
    """Indexes of the calls."""
    clients: list[str]
    """The programs that made the calls, as far as the policy server recorded them."""
    advice: str


@dataclass(frozen=True, slots=True)
class ToolAccount:
    """One tool step of the agent. Without a span or log record of its own it has no `seconds`, and begins when its call came back."""

    name: str
    agent: str | None
    start_s: float
    seconds: float | None
    failed: bool
    arguments: str | None
    result: str | None
    error: str | None = None
    call: int | None = None
    """Index of the call whose answer asked for it; None if unknown."""


@dataclass(frozen=True, slots=True)
class EdgeAccount:
    """One evaluation and the call or rollout that it is bound to."""

    name: str
    score: float | None
    source: str
    at_s: float | None
    """Seconds since the rollout began."""
    on: str | None
    """Name of the span that it was recorded on; None if it names only the rollout."""
    rule: str | None
    """The binding rule; None if it does not count."""
    why: str
    """The rule in words, or why it does not count."""
    call: int | None
    """Index of the call that it rewards; None: the rollout."""
    explanation: str | None = None
    """The reason that its sender gave."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A rollout of the compared group."""

    rollout_id: str
    attempt: int
    reward: float
    calls: int
    is_this: bool


@dataclass(frozen=True, slots=True)
class CreditAccount:
    """How the advantages were computed."""

    reward: float | None
    """R of the rollout, None without a reward."""
    group_id: str | None
    members: list[GroupMember]
    lines: list[str]
    """The computation in numbers, one step per line."""
    greatest: float
    """Greatest |advantage| within the group, the scale of the colors; 0 if there is no advantage."""


@dataclass(frozen=True, slots=True)
class BranchAccount:
    """What the rollout is a branch of."""

    of: BranchOrigin
    repeated: int
    """Calls that the policy server answered with stored tokens."""
    sampled: int
    """Calls with tokens after them."""


@dataclass(frozen=True, slots=True)
class RolloutAccount:
    """Everything about one (rollout, attempt)."""

    rollout_id: str
    attempt: int
    run_id: str | None
    round: int | None
    task_id: str | None
    split: str | None
    status: str | None
    reason: str | None
    """Why none of its calls is trained; None if some may be."""
    start_ns: int
    seconds: float | None
    calls: list[CallAccount]
    foreign: list[ForeignAccount]
    tools: list[ToolAccount]
    edges: list[EdgeAccount]
    credit: CreditAccount
    decoded_with: str | None
    """The model whose tokenizer was used."""
    dataset: str | None = None
    """The dataset in question."""
    agrees: bool | None = None
    """Whether that dataset's rows have exactly these advantages; None without a dataset."""
    unlike: int = 0
    """Number of rollouts compared by the dataset that are missing in the stores or have a different reward there."""
    lacks: list[Lack] = field(default_factory=list)
    """Missing pieces: of an unfinished rollout, and tools that are offered and not in the prompts."""
    untrained: list[UntrainedAccount] = field(default_factory=list)
    answer: str | None = None
    """The task's answer as JSON, if the runner stored one."""
    error: str | None = None
    """What its own span says about its failure; of a branch that diverged, the first token that differs."""
    branch: BranchAccount | None = None
    """None if it is no branch."""
    branches: list[tuple[int | None, StoredBranch]] = field(default_factory=list)
    """Its own branches with the index of the call that they sample anew (None: no such call); empty if not asked for."""

    @property
    def verdict(self) -> str | None:
        """Whether the dataset agrees, in words; None without a dataset."""
        if self.dataset is None:
            return None
        agreement = "its rows hold exactly these advantages" if self.agrees else "its rows hold OTHER advantages"
        if not self.unlike:
            return f"{self.dataset}: {agreement}"
        many = (
            f"{self.unlike} of the rollouts that it compared are"
            if self.unlike > 1
            else "1 rollout that it compared is"
        )
        return f"{self.dataset}: {agreement}; {many} not in these stores with the same reward"

    def record(self) -> dict[str, object]:
        """The account as JSON values."""
        return asdict(self)

    @property
    def agents(self) -> list[str]:
        """Agents in the order of their first calls."""
        callers = [(call.start_s, call.agent) for call in self.calls]
        callers += [(call.start_s, call.agent) for call in self.foreign]
        return list(dict.fromkeys(agent or "–" for _, agent in sorted(callers, key=lambda call: call[0])))
