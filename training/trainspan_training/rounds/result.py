"""The outcome of a dataset, as reported by the commands."""

from dataclasses import asdict, dataclass

from trainspan_schemas.command_events import RoundTrained
from trainspan_training.checkpoints.swap_request import Swap
from trainspan_training.metrics.round_record import RoundRecord, finite

__all__ = ["NO_ROWS", "RoundResult"]

NO_ROWS = "the dataset has no rows"


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of one round."""

    round: int
    version: int
    """Version of the newest good policy afterwards."""
    checkpoint: str | None
    """Its checkpoint; None if it is still the starting model."""
    record: RoundRecord | None
    """None if nothing was trained."""
    swap: Swap
    skipped: str | None = None
    """Why nothing was trained."""
    error: str | None = None
    """What went wrong, in which case the previous policy is kept."""
    recovered: bool = False
    """Whether the trainer was killed after it published the checkpoint, and its figures are lost."""

    @property
    def failure(self) -> str | None:
        """Why this round failed, or None; an unreachable policy server is not a failure."""
        return self.error or self.skipped or (self.swap.error if self.swap.outcome in ("failed", "unfit") else None)

    def line(self) -> str:
        """One line of text."""
        if self.recovered:
            return f"round {self.round}: {self.checkpoint} was made by a trainer that was killed; its figures are lost"
        if self.record is None or self.error:
            return f"round {self.round}: {self.error or self.skipped}; policy {self.version} stays"
        record = self.record
        swap = {
            "off": "not published",
            "unreachable": "no policy server",
            "busy": "the policy server is busy",
            "swapped": "swapped in",
        }
        return (
            f"round {self.round}: {self.checkpoint}, {record.rows} calls of {record.rollouts} rollouts, "
            f"reward {record.reward_mean:.3f}, loss {record.loss:.4f}, grad norm {record.grad_norm:.3f}, kl {record.kl:.4f}, "
            f"clipped {record.clip_fraction:.3f}, mean |Δlogp| {record.logp_diff_mean:.2g}, "
            f"{record.micro_batches} micro-batches of up to {record.micro_batch_tokens} tokens, "
            f"{sum(record.seconds.values()) - record.seconds['wait']:.2f} s, {swap.get(self.swap.outcome, self.swap.error)}"
            + (f"; alarms: {', '.join(record.alarms)}" if record.alarms else "")
        )

    def event(self) -> RoundTrained:
        """What the command tells programs."""
        metrics = finite(asdict(self.record)) if self.record else {}
        seconds = {stage: round(seconds, 4) for stage, seconds in metrics.get("seconds", {}).items()}
        return RoundTrained.of_metrics(
            metrics,
            round=self.round,
            version=self.version,
            checkpoint=self.checkpoint,
            seconds=seconds,
            swap=self.swap.answer,
            skipped=self.skipped,
            error=self.error,
            recovered=self.recovered,
        )
