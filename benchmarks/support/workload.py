"""Training calls of fixed lengths."""

from dataclasses import dataclass

from tests.support.dataset_files import LoggedCall

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts of fixed lengths, `group` of them with the same first prompt."""

    groups: int
    group: int
    turns: int
    prompt: int
    sampled: int
    observed: int

    def calls(self, vocabulary: int, seed: int = 0) -> list[LoggedCall]:
        """The calls; log-probabilities are made up, since their values are not measured."""
        import numpy as np

        rng = np.random.default_rng(seed)
        calls, prompt = [], list[int]()
        for rollout in range(self.groups * self.group):
            if rollout % self.group == 0:
                prompt = rng.integers(3, vocabulary, self.prompt).tolist()
            tokens: list[int] = []
            advantage = float(rng.normal())
            for turn in range(self.turns):
                known = len(tokens)
                tokens += rng.integers(3, vocabulary, self.observed).tolist() if turn else prompt
                sampled = rng.integers(3, vocabulary, self.sampled).tolist()
                calls.append(
                    LoggedCall(
                        f"rollout-{seed}-{rollout}",
                        list(tokens),
                        sampled,
                        [-5.7] * self.sampled,
                        advantage=advantage,
                        call_index=turn,
                        segment_pos=turn,
                        prefix_len=known,
                    )
                )
                tokens += sampled
        return calls
