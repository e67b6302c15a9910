"""Which settings are admitted, checked before anything heavy is imported.

The law that admits an option: splitting a step into more micro-batches changes neither loss nor gradient.
"""

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.settings import TrainSettings

__all__ = ["LOSSES", "WEIGHTS", "check", "clip_range"]

LOSSES = {"dapo": 0.28, "cispo": 5.0}
"""Loss → its default `epsilon_high`. dapo clips the ratio at 1 + ε; cispo caps it at ε itself."""

WEIGHTS = ("rollout", "token")


def check(settings: TrainSettings) -> None:
    """Raises ConfigError for a setting that is unknown or cannot be meant."""
    if settings.loss not in LOSSES:
        raise ConfigError(
            f"train.loss = {settings.loss!r} is not admitted; choose {' or '.join(LOSSES)} "
            "(TRL's others normalise within a micro-batch, so that batching would change the gradient)"
        )
    if settings.weights not in WEIGHTS:
        raise ConfigError(f"train.weights = {settings.weights!r} is not known; choose {' or '.join(WEIGHTS)}")
    positive = ("learning_rate", "steps_per_round", "max_grad_norm", "micro_batch_tokens", "max_kl", "keep_checkpoints")
    for name in positive:
        if not getattr(settings, name) > 0:
            raise ConfigError(f"train.{name} = {getattr(settings, name)} must be greater than 0")
    if settings.policy_url != "none" and not settings.policy_url.startswith(("http://", "https://")):
        raise ConfigError(
            f'train.policy_url = {settings.policy_url!r} is neither "none" nor starts with http:// or https://'
        )
    low, high = clip_range(settings)
    if not 0 <= low <= 1 <= high:
        raise ConfigError(
            f"train.epsilon and train.epsilon_high clip the ratio to {low:g} … {high:g}: that must hold 1"
        )


def clip_range(settings: TrainSettings) -> tuple[float, float]:
    """The ratios beyond which a token gives no gradient (dapo), or is capped (cispo)."""
    high = LOSSES[settings.loss] if settings.epsilon_high is None else settings.epsilon_high
    return (1 - settings.epsilon, 1 + high) if settings.loss == "dapo" else (0.0, high)
