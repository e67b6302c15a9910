"""Settings of the trained model, of supervised training and of the trainer."""

from dataclasses import dataclass
from typing import Final, Literal

from trainspan_schemas.config.marks import Advanced

__all__ = ["DEFAULT_LORA_RANK", "ModelSettings", "SftSettings", "TrainSettings"]

DEFAULT_LORA_RANK: Final = 16
"""Rank of a trained adapter if `[model] lora_rank` is not set, and of the adapters that are served with it."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """`[model]`: what is trained of a model, and on which device, by the trainer and by supervised training."""

    adapter: Literal["none", "lora"] = "none"
    """`none` (train all weights) or `lora` (train a low-rank adapter on frozen weights).

    An adapter takes a fraction of the memory and has small checkpoints."""
    lora_rank: int | None = None
    """Rank of the adapter; default: 16.

    The server's `max_lora_rank` must allow it."""
    lora_alpha: float | None = None
    """The adapter's output is scaled by alpha / rank; default: twice the rank."""
    lora_targets: Advanced[str | None] = None
    """Comma-separated names of the adapted modules; default: all linear layers except the output head."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: `cpu`, `cuda`, or `auto`, a GPU if there is one.

    With `auto`, training is refused where a GPU is that PyTorch does not see."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the computation: `float32` or `bfloat16` (autocast); default: bfloat16 on a GPU, else float32.

    Trained weights, gradients and Adam's moments are float32 in both cases."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them; default: where it fits into memory, the faster."""
    memory_gib: float | None = None
    """Memory that training may use on its device; default: the memory that is free at its start.

    The memory estimate is compared with it before anything is loaded."""
    memory_share: Advanced[float] = 1.0
    """Share of the device's free memory, for trainers that start on the same device at the same time.

    The loop divides the memory among the trainers of several policies."""
    micro_batch_tokens: int | None = None
    """Maximum number of tokens in one forward pass, padding included; default: 16384, or as many as fit into memory.

    Set it if runs must be bit-identical on machines with different amounts of free memory."""
    forward: Literal["auto", "padded", "packed", "tree"] = "auto"
    """`padded`, `packed` (rows one after another, no padding), `tree` (shared prefixes are forwarded once), or `auto` (the
    cheapest)."""


@dataclass(frozen=True, slots=True)
class SftSettings(ModelSettings):
    """`[sft]`: conversations in, a model to start from out, with TRL's names (`SFTConfig`) for what TRL does."""

    model: str | None = None
    """Model directory or Hugging Face id to start from; default: `[train] model`, else the model last served."""
    chat_template_path: str | None = None
    """Jinja file with the chat template to train and serve with; default: the model's own.

    It is saved with the result, so that `trainspan serve` renders conversations in the same way."""
    assistant_only_loss: Advanced[bool] = True
    """Train the model's answers only, each with the token that ends it; otherwise all tokens."""
    num_train_epochs: float = 3.0
    """Number of passes over the conversations."""
    max_steps: int | None = None
    """Number of optimizer steps, whatever the number of passes; default: `num_train_epochs` decides."""
    gradient_accumulation_steps: Advanced[int | None] = None
    """Forward passes in an optimizer step, each of one pack of conversations; default: those of a 32nd of an epoch, with 256 to
    16384 trained tokens."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW; default: 2e-4 up to 135 million weights, falling to 1e-5 at a billion; ten times that for
    an adapter."""
    lr_scheduler_type: Advanced[Literal["cosine", "linear", "constant_with_warmup"]] = "cosine"
    """Course of the learning rate after the warmup."""
    warmup_steps: Advanced[float] = 0.05
    """Steps over which the learning rate rises from 0; below 1 a share of all steps, rounded down."""
    max_length: int | None = None
    """Greatest number of tokens of a call, prompt and answer; default: the model's context.

    Longer calls are left out and counted."""
    eval_fraction: Advanced[float] = 0.05
    """Share of the conversations that is held out for the evaluation loss.

    Conversations with the same first prompt are held out together."""
    eval_steps: Advanced[int | None] = None
    """Steps between evaluations; default: one per epoch."""
    save_steps: Advanced[int | None] = None
    """Steps between saved states, from which a job that was stopped continues; default: those of five minutes."""
    lora_result: Literal["merged", "adapter"] = "merged"
    """The result with `adapter = "lora"`: `merged` (a whole model) or `adapter` (the adapter alone, to be served on its base).

    Only a whole model can be the start of `trainspan train` and `trainspan loop`."""
    seed: int = 0
    """Seed for the order of conversations, the held-out share and a new adapter."""


@dataclass(frozen=True, slots=True)
class TrainSettings(ModelSettings):
    """`[train]`: Parquet in, checkpoints out."""

    model: str | None = None
    """Model directory or Hugging Face id to start from if there is no checkpoint yet; default: the model last served."""
    checkpoints: str | None = None
    """Folder of checkpoints; default: `$TRAINSPAN_HOME/checkpoints`.

    The policy server must see the same folder, unless `checkpoints_url` is set."""
    checkpoints_url: str | None = None
    """URL under which checkpoints are published for policy servers on other machines, such as `s3://bucket/prefix` or
    `file:///shared/folder`; default: none."""
    policy_url: str = "http://127.0.0.1:8000"
    """Policy server to swap after each round, or several with commas; default: that of `[serving]`; `none` only writes checkpoints."""
    publish_timeout_s: Advanced[float] = 300.0
    """How long a swap is retried while the server is busy, or unavailable after it was reached in the same round.

    While a server copies the checkpoint, the time begins again with each step forward."""
    learning_rate: float | None = None
    """Learning rate of AdamW; default: 2e-5 up to 135 million weights, falling to 1e-6 at a billion; ten times that for an
    adapter.

    `metrics.jsonl` and the round's event name the rate that was used."""
    warmup_rounds: int = 1
    """Rounds of a run over which the learning rate rises from 0, again where Adam's state was lost; refused ones do not count.

    Without it Adam's first steps move the policy furthest, with the least information."""
    weight_decay: Advanced[float] = 0.0
    """Weight decay of AdamW; norms and biases are excluded."""
    adam_beta2: Advanced[float] = 0.999
    """Decay of Adam's mean of squared gradients per step; 0.95 to 0.99 follows gradients of changing size faster."""
    rollouts_per_step: int = 8
    """Rollouts in an optimizer step; a round has as many steps as its trained rollouts fill, at least one.

    Smaller steps learn more from a round and move further from its data."""
    passes: int = 1
    """How often a round's steps are made.

    More passes learn more from each rollout, at the cost of a forward and a backward pass each."""
    negative_weight: Advanced[float] = 1.0
    """Factor of negative advantages in the loss: 1 leaves them as they are, 0 trains on positive ones only.

    Below 1 rewards rise faster in the first rounds, and answers lose their variety sooner."""
    target_kl: float = 0.2
    """k3 against the ratio's other policy at which a round's steps end; the last one is shortened to reach it; 0: no limit."""
    signal_gate: Advanced[bool] = False
    """Make smaller steps after rounds whose rewards look independent of the answers
    ([the test](training.md#do-rewards-carry-a-signal))."""
    loss: str = "clip"
    """`clip` (PPO's surrogate with a clipped ratio) or `cispo` (a capped ratio, and every token gives a gradient).

    `cispo` is for rare but important tokens."""
    epsilon: float | None = None
    """Lower clip of the importance ratio, 1 − ε; default: 0.2, or 3e-4 with `ratio = "call"`.

    It cannot be set with `cispo`."""
    epsilon_high: float | None = None
    """Upper clip of the importance ratio, 1 + ε, or with `cispo` the cap itself; default: 0.28, or 4e-4 with
    `ratio = "call"`, or 5 with `cispo`.

    The higher upper side keeps exploration."""
    ratio: Literal["token", "call"] = "token"
    """Unit of the importance ratio: `token`, or `call` (geometric mean over a call's tokens, as in GSPO).

    `call` is for long answers and mixtures of experts."""
    weights: str = "rollout"
    """Weights of tokens: `rollout` (mean over rollouts of the mean over their tokens), `token` (mean over tokens), `const`,
    or `module:function`.

    With `token`, long rollouts count more. With `const`, sums are divided by `const_tokens`, as in Dr. GRPO."""
    const_tokens: Advanced[int | None] = None
    """With `weights = "const"`: divisor of the sum over each rollout, whatever its length; default: none, required by
    `const`."""
    kl_coef: float = 0.0
    """Coefficient of the KL divergence to the model that the run started from, in the loss.

    If it is not 0, that model is loaded as well (except with LoRA), and each row is forwarded once more."""
    observation_weight: float = 0.0
    """Weight of the cross-entropy of tool results and user turns in the loss (ECHO), whose authors take 0.05.

    These tokens are in the rows already, so nothing more is forwarded. With `[dataset] keep_zero_spread` groups whose rewards
    are all equal teach them, too."""
    old_policy: Advanced[Literal["logged", "recompute"] | None] = None
    """Denominator of the ratio: `logged` (the sampler) or `recompute` (the policy at the round's start); default: chosen by
    round.

    `logged` is chosen if all calls are of the current version and both server and trainer compute in float32."""
    correction: Advanced[Literal["truncate", "mask", "none"] | None] = None
    """With `recompute`: weight of a token by w = π_old/π_sampler: `truncate` (min(w, cap)), `mask` (w within 1/cap … cap,
    else 0) or `none`; default: `truncate`."""
    correction_cap: Advanced[float | None] = None
    """Cap of `correction`; default: 2."""
    reject_ratio: Advanced[float | None] = None
    """With `recompute`: drop calls whose geometric mean of w is outside 1/x … x; default: none are dropped.

    Values of 1.05 to 1.5 are usual."""
    max_staleness: int | None = None
    """Do not train calls with more updates between one of their versions and the policy than this; default: no limit.

    With a limit, calls of unknown version are not trained either."""
    max_grad_norm: Advanced[float] = 1.0
    """Norm to which a larger gradient is clipped."""
    merge: Advanced[bool] = True
    """Merge the calls of a segment into one row, so that each token is forwarded once per rollout."""
    max_kl: float = 0.5
    """Limit of k3 against the ratio's other policy; beyond it the round ends and the previous policy stays."""
    max_ratio: Advanced[float] = 1000.0
    """Limit of a token's importance ratio; beyond it the round ends and the previous policy stays."""
    engine_mismatch: Advanced[float | None] = None
    """Alarm threshold of the mean |Δ log-probability| between server and trainer; default: 3e-5 if both compute in float32,
    else 0.1.

    It is measured at the first step of a round on fresh data. The threshold of k3 is its square."""
    keep_checkpoints: Advanced[int] = 5
    """Number of newest checkpoints kept on disk.

    `latest`, its parent and the served checkpoint are always kept."""
    keep_start: Advanced[bool] = False
    """Also write the model that the run starts from as a checkpoint, so that it can be put back in service.

    The loop sets it with `[loop] trial_tasks`."""
    token_figures_mib: Advanced[float] = 64.0
    """Maximum MiB of per-token figures that a round writes (17 bytes a token, before compression); 0: none are written.

    They are the trainer's log-probability, entropy, ratio and clip of each trained token, for `trainspan view`."""
    report_to: str = "none"
    """Trackers of each round's figures in addition to `metrics.jsonl`: `tensorboard`, `trackio`, `wandb`, several with
    commas, or `none`."""
    seed: int = 0
    """Seed for the order of rollouts and for a new adapter."""
