"""The parts of a training process put together: model or adapter, TRL's trainer, and the rounds that it goes through."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainspan_schemas.settings import TrainSettings
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.data.layout import batch_layout
from trainspan_training.data.loss_weights import Rule
from trainspan_training.devices.team import Team
from trainspan_training.model.full_weights import FullWeights, has_slices
from trainspan_training.model.loading import find_model, hollow_model, load_config, load_model, load_tokenizer
from trainspan_training.model.lora import AdapterWeights, add_adapter
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective import attention, memory
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
from trainspan_training.objective.options import compute_dtype
from trainspan_training.rounds.owed_state import Owed
from trainspan_training.rounds.result import Result
from trainspan_training.rounds.rounds import Rounds

__all__ = ["Learner"]


class Learner:
    """Loads what the settings ask for. Raises CheckpointError, ConfigError or TrainingError where that cannot be had."""

    def __init__(
        self,
        datasets: Iterable[DatasetFolder],
        checkpoints: Checkpoints | None,
        policy: Policy,
        settings: TrainSettings,
        rule: Rule,
        on_result: Callable[[Result], None],
        team: Team,
        keep_going: bool,
        owed: Owed | None = None,
    ) -> None:
        if owed:
            policy = owed.parent
        config = load_config(policy.model)
        cuda = torch.cuda.is_available()
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", team.size))
        free = memory.available(settings, cuda=cuda, processes=beside)
        budget = memory.fit(config, settings, free, cuda=cuda, team=team)
        adapted = settings.adapter == "lora"
        model = hollow_model(config) if team.splits else None
        hollow = model is not None and has_slices(model, policy.model)
        if model is None or not hollow:
            # What is split is all of one type.
            halved = compute_dtype(settings, cuda=cuda) == "bfloat16" and not team.splits
            model = load_model(policy.model, frozen=adapted and halved)
        tokenizer = load_tokenizer(policy.model)
        masks = attention.prepare(model, settings.forward)
        layout = batch_layout(settings, config, cuda=cuda, budget=budget, masks=masks, processes=team.size)
        weights: FullWeights | AdapterWeights
        if adapted:
            model = add_adapter(model, settings, policy)
            weights = AdapterWeights(model)
        else:
            weights = FullWeights(model)
        self._rounds = Rounds(
            datasets,
            checkpoints,
            policy,
            settings,
            on_result,
            layout=layout,
            rule=rule,
            weights=weights,
            keep_going=keep_going,
            owed=owed,
            hollow=hollow,
        )
        output_dir = str(checkpoints.root) if checkpoints else "."
        trainer = TransitionGRPOTrainer(model, tokenizer, settings, self._rounds, output_dir, team=team)
        self._rounds.trainer = trainer
        if settings.kl_coef and not adapted:
            self._rounds.reference = _reference(policy, settings.forward).to(trainer.accelerator.device)

    def train(self) -> None:
        """Until there are no more datasets."""
        trainer = self._rounds.trainer
        try:
            trainer.train()
        except BaseException:
            # Reporters end their runs.
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise
        finally:
            self._rounds.close()


def _reference(policy: Policy, forward: str) -> Any:
    """The model that the run started from, without gradients; rows go through it as through the policy."""
    model = load_model(find_model(policy.base), frozen=True).requires_grad_(False)
    attention.prepare(model, forward)
    return model
