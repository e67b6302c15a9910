"""`trainspan reward`."""

import json
from typing import Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, settings


@setting_options("rollouts", "collector", "token_file")
def reward(
    *,
    value: Annotated[float, typer.Option(help="The score, a finite number.")],
    rollout: Annotated[str | None, typer.Option(help="Whole id of the rewarded rollout.")] = None,
    response: Annotated[
        str | None, typer.Option(help="Or the id of a response (chatcmpl-…), to reward that one call.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the evaluation.")] = "reward",
    explanation: Annotated[str | None, typer.Option(help="Reason for the score.")] = None,
    source: Annotated[str, typer.Option(help="Source of the score: human or agent.")] = "human",
    id: Annotated[
        str | None,
        typer.Option(
            help="Id of the evaluation, such as one made from user and response: sent again, it does not count again."
            " [default: a new one, so that each reward is added to those before]."
        ),
    ] = None,
    given: Given,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Reward a rollout, or one response of a call, after the fact; the next dataset uses it.

    Example: trainspan reward --rollout 0b8e4c7af2d94e0b8a6d1c35e97f4b20 --value 1 --name reward
    """
    import math
    import os

    from trainspan_cli.clients.feedback import FeedbackScore, send_scores
    from trainspan_schemas.config.load import override
    from trainspan_schemas.errors import UsageError
    from trainspan_schemas.store.collectors import Collectors
    from trainspan_schemas.store.senders import sender_headers, token_advice
    from trainspan_schemas.telemetry import keys

    if (rollout is None) == (response is None):
        raise UsageError("name the target: either --rollout ID or --response ID")
    if not math.isfinite(value):
        raise UsageError(f"--value {value}: a reward must be a finite number")
    if source == keys.LABEL:
        raise UsageError("a label says who gave it and can be taken back: give it in trainspan view, page labels")
    chosen = settings(config)
    sender = override(chosen.rollouts, **given)
    # A dataset finds the reward of a response in any store: this one is the same for each reward of the response.
    collector = Collectors.of(sender.collector).url_for(rollout or response or "")
    store = chosen.collector.store
    headers = sender_headers("runner", collector, os.environ, token_file=sender.token_file, store=store)
    advice = token_advice("runner", collector, os.environ, token_file=sender.token_file, store=store)
    headers = headers or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS")
    feedback = FeedbackScore(value, name, source, rollout, response, explanation, evaluation_id=id)
    certificate = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
    (evaluation_id,) = send_scores([feedback], collector, headers, certificate, token_advice=advice)
    if format == "json":
        print(json.dumps({"evaluation_id": evaluation_id, "rollout": rollout, "response": response, "value": value}))
    else:
        print(f"{name} = {value:g} for {'rollout' if rollout else 'response'} {rollout or response}")
