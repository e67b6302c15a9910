"""A model class for mini-swe-agent: its text-based one for OpenRouter, pointed at the policy.

LiteLLM, the usual way, takes four seconds of CPU time to import in every rollout.
"""

import os
from typing import Any

import requests
from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel

TIMEOUT_S = 600.0


class ChatModel(OpenRouterTextbasedModel):
    """Chat completions of any server; mini-swe-agent takes a model class by its import path."""

    def _query(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """Returns the server's answer as JSON. Raises requests.RequestException, which mini-swe-agent retries."""
        answer = requests.post(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
            json={"model": self.config.model_name, "messages": messages, **self.config.model_kwargs, **options},
            timeout=TIMEOUT_S,
        )
        answer.raise_for_status()
        return answer.json()
