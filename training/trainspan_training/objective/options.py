"""Validates settings before anything heavy is imported.

Two rules decide what is allowed: splitting a step into more micro-batches changes neither loss nor gradient, and every
setting that is given has an effect.
"""

from importlib.util import find_spec

from trainspan_schemas.agents.functions import is_function_name
from trainspan_schemas.config.settings import ModelSettings, TrainSettings
from trainspan_schemas.errors import ConfigError, pip_install

__all__ = ["LOSSES", "WEIGHTS", "check", "check_model", "clip_range", "compute_dtype", "reporters"]

LOSSES = ("clip", "cispo")
"""`clip`: PPO's surrogate (arXiv 1707.06347), which clips the ratio at 1 + ε; `cispo` (arXiv 2506.13585) caps at ε."""

_CLIP = {"token": (0.2, 0.28), "call": (3e-4, 4e-4)}
"""Ratio → default (`epsilon`, `epsilon_high`) of `clip`: DAPO's (arXiv 2503.14476, section 3.1), GSPO's (arXiv
2507.18071, section 5.1). The geometric mean over a call varies orders of magnitude less than a token's ratio."""

_CAP = 5.0
"""Default `epsilon_high` of `cispo`."""

_COMPOSED = {"dapo": 'loss = "clip" with weights = "token"', "gspo": 'loss = "clip" with ratio = "call"'}
"""Algorithms that are combinations of settings here."""

WEIGHTS = ("rollout", "token", "const")

_REPORTERS = ("tensorboard", "trackio", "wandb")

_PER_MICRO_BATCH = ("grpo", "bnpo", "dr_grpo", "sapo", "luspo")
_PER_ROW = ("vespo",)

_POSITIVE = (
    "learning_rate",
    "rollouts_per_step",
    "passes",
    "max_grad_norm",
    "max_kl",
    "keep_checkpoints",
    "const_tokens",
    "engine_mismatch",
)
_POSITIVE_OF_MODEL = ("micro_batch_tokens", "lora_rank", "lora_alpha", "memory_gib", "memory_share")
_ABOVE_ONE = ("correction_cap", "reject_ratio", "max_ratio")


def check(settings: TrainSettings) -> None:
    """Raises ConfigError for a setting that is unknown, invalid, or has no effect with the others."""
    check_model(settings)
    _check_loss(settings.loss)
    if settings.weights not in WEIGHTS and not is_function_name(settings.weights):
        known = ", ".join(WEIGHTS)
        raise ConfigError(f"train.weights = {settings.weights!r} is not known; choose {known} or module:function")
    _check_numbers(settings)
    _check_idle(settings)
    _check_reporters(settings)
    if settings.policy_url != "none" and not settings.policy_url.startswith(("http://", "https://")):
        raise ConfigError(
            f'train.policy_url = {settings.policy_url!r} is neither "none" nor starts with http:// or https://'
        )
    low, high = clip_range(settings)
    if not 0 <= low <= 1 <= high:
        raise ConfigError(
            f"train.epsilon and train.epsilon_high clip the ratio to {low:g} … {high:g}: the range must include 1"
        )


def check_model(settings: ModelSettings) -> None:
    """Raises ConfigError for a setting of `[model]` that is invalid, or has no effect with the others."""
    _check_positive("model", settings, _POSITIVE_OF_MODEL)
    if settings.memory_share > 1:
        raise ConfigError(f"model.memory_share = {settings.memory_share:g} must be at most 1")
    for name in ("lora_rank", "lora_alpha", "lora_targets") if settings.adapter == "none" else ():
        if (value := getattr(settings, name)) is not None:
            raise ConfigError(
                f'model.{name} = {value!r} has no effect: adapter = "none" trains no adapter; leave it out'
            )


def clip_range(settings: TrainSettings) -> tuple[float, float]:
    """The ratios beyond which a token has no gradient (clip) or is capped (cispo)."""
    if settings.loss == "cispo":
        return 0.0, _CAP if settings.epsilon_high is None else settings.epsilon_high
    low, high = _CLIP[settings.ratio]
    return (
        1 - (low if settings.epsilon is None else settings.epsilon),
        1 + (high if settings.epsilon_high is None else settings.epsilon_high),
    )


def compute_dtype(settings: ModelSettings, *, cuda: bool) -> str:
    """The dtype that the trainer computes in: `float32` or `bfloat16`."""
    return settings.dtype or ("bfloat16" if cuda else "float32")


def reporters(settings: TrainSettings) -> list[str]:
    """The names in `report_to`; empty for "none"."""
    names = settings.report_to.replace(" ", "").split(",")
    return [] if names == ["none"] else names


def _check_reporters(settings: TrainSettings) -> None:
    for name in reporters(settings):
        if name not in _REPORTERS:
            known = ", ".join(_REPORTERS)
            raise ConfigError(
                f"train.report_to = {settings.report_to!r}: {name!r} is not known; choose from {known}, or none"
            )
        if find_spec(name) is None:
            raise ConfigError(
                f"train.report_to = {settings.report_to!r}: {name} is not installed; run {pip_install(name)}"
            )


def _check_loss(loss: str) -> None:
    if loss in LOSSES:
        return
    reasons = dict.fromkeys(_PER_MICRO_BATCH, "it normalizes within a micro-batch, so batching would change it")
    reasons |= dict.fromkeys(_PER_ROW, "it weights a row as a whole, and a row here holds several calls")
    reasons |= {name: f"it is {settings} here" for name, settings in _COMPOSED.items()}
    reason = f" ({reasons[loss]})" if loss in reasons else ""
    raise ConfigError(f"train.loss = {loss!r} is not supported{reason}; choose {' or '.join(LOSSES)}")


def _check_positive(section: str, settings: ModelSettings, names: tuple[str, ...]) -> None:
    for name in names:
        if (value := getattr(settings, name)) is not None and not value > 0:
            raise ConfigError(f"{section}.{name} = {value} must be greater than 0")


def _check_numbers(settings: TrainSettings) -> None:
    _check_positive("train", settings, _POSITIVE)
    for name in _ABOVE_ONE:
        if (value := getattr(settings, name)) is not None and not value > 1:
            raise ConfigError(f"train.{name} = {value} must be greater than 1")
    for name in (
        "kl_coef",
        "observation_weight",
        "max_staleness",
        "warmup_rounds",
        "weight_decay",
        "token_figures_mib",
        "negative_weight",
        "target_kl",
    ):
        if (value := getattr(settings, name)) is not None and not value >= 0:
            raise ConfigError(f"train.{name} = {value} must not be less than 0")
    if not 0 <= settings.adam_beta2 < 1:
        raise ConfigError(f"train.adam_beta2 = {settings.adam_beta2} must be at least 0 and less than 1")
    if settings.target_kl >= settings.max_kl:
        raise ConfigError(
            f"train.target_kl = {settings.target_kl:g} must be less than train.max_kl = {settings.max_kl:g}, which ends the round"
        )


def _check_idle(settings: TrainSettings) -> None:
    """Refuses settings that would have no effect."""
    idle = [
        ("epsilon", settings.loss == "cispo", 'loss = "cispo" has no lower clip'),
        ("const_tokens", settings.weights != "const", f'weights = "{settings.weights}" does not divide by a constant'),
        *(
            (name, settings.old_policy == "logged", 'old_policy = "logged" leaves nothing to correct')
            for name in ("correction", "correction_cap", "reject_ratio")
        ),
        ("correction_cap", settings.correction == "none", 'correction = "none" has no cap'),
        (
            "observation_weight",
            settings.observation_weight > 0 and not settings.merge,
            "merge = false leaves no tokens between the calls of a row",
        ),
    ]
    for name, unused, reason in idle:
        if unused and getattr(settings, name) is not None:
            raise ConfigError(f"train.{name} = {getattr(settings, name)!r} has no effect: {reason}; leave it out")
    if settings.weights == "const" and settings.const_tokens is None:
        raise ConfigError('train.weights = "const" needs train.const_tokens, the tokens that each sum is divided by')
