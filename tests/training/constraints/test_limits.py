"""Scores under masks and biases: values and gradients against a dense softmax over allowed tokens, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.training.support.memory_use import peak
from trainspan_training.constraints.bad_words import BadWords
from trainspan_training.data.token_limits import FREE, LimitTable, TokenLimits, TooManyLimitsError, pack
from trainspan_training.objective.head import Traced, head_scores
from trainspan_training.objective.token_stats import TokenSums

VOCABULARY = 97
POSITIONS = 29


def traced(size: int, dtype: torch.dtype = torch.float32) -> Traced:
    return torch.empty(1, 0, size, dtype=dtype).as_subclass(Traced)


def allowing(ids: list[int]) -> Any:
    return pack(np.array(ids, dtype=np.int32), VOCABULARY)


def problem(seed: int = 0) -> tuple[TokenLimits, Tensor, Tensor]:
    """(limits, allowed (N, V), biases (N, V)) of positions with few, many, or one token, with biases, and free ones."""
    rng = np.random.default_rng(seed)
    table = LimitTable(VOCABULARY)
    allowed, biases = np.ones((POSITIONS, VOCABULARY), dtype=bool), np.zeros((POSITIONS, VOCABULARY))
    index = []
    for position in range(POSITIONS):
        kind = position % 6
        ids = {1: 1, 2: 5, 3: 60, 5: 40}.get(kind)
        mask = None
        if ids:
            chosen = rng.choice(VOCABULARY, ids, replace=False)
            mask = allowing(chosen.tolist())
            allowed[position] = np.isin(np.arange(VOCABULARY), chosen)
        added = tuple((int(token), float(rng.normal(0, 3))) for token in (3, 50, 96)) if kind in (4, 5) else ()
        for token, bias in added:
            biases[position, token] = bias
        index.append(table.add(mask, added))
    return TokenLimits(table, np.array(index, dtype=np.int32)), torch.from_numpy(allowed), torch.from_numpy(biases)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_scores_and_gradients_are_those_of_the_distribution_over_what_may_come(chunk: int) -> None:
    torch.manual_seed(0)
    limits, allowed, biases = problem()
    head = nn.Linear(8, VOCABULARY).double()
    states = torch.randn(POSITIONS, 8, dtype=torch.float64)
    temperatures = torch.rand(POSITIONS, dtype=torch.float64) + 0.5
    targets = torch.stack(
        [row.nonzero()[int(place)][0] for place, row in enumerate(allowed) for place in [len(row.nonzero()) // 2]]
    )
    weights = torch.linspace(-1, 1, POSITIONS, dtype=torch.float64)
    found = []
    for ours in (False, True):
        head.zero_grad()
        hidden = states.clone().requires_grad_()
        if ours:
            logprobs, entropies = head_scores(head, traced(VOCABULARY), hidden, targets, temperatures, chunk, limits)
        else:
            logits = ((head(hidden) + biases) / temperatures[:, None]).masked_fill(~allowed, float("-inf"))
            distribution = torch.log_softmax(logits, dim=1)
            logprobs = distribution.gather(1, targets[:, None])[:, 0]
            entropies = -(distribution.exp() * distribution.masked_fill(~allowed, 0)).sum(dim=1)
        (logprobs * weights).sum().backward()
        found.append(
            [logprobs.detach(), entropies.detach(), hidden.grad, head.weight.grad.clone(), head.bias.grad.clone()]
        )
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    forced = torch.from_numpy(limits.forced())
    assert forced.sum() == 5
    assert (found[1][0][forced] == 0).all()
    assert (found[1][2][forced] == 0).all()


def test_in_bfloat16_what_may_not_come_has_no_share_and_a_forced_token_no_gradient() -> None:
    """Under autocast, against the same head in float32; logits are rounded, but not the distribution over them."""
    torch.manual_seed(0)
    limits, allowed, biases = problem()
    head = nn.Linear(8, VOCABULARY)
    targets = torch.stack([row.nonzero()[-1][0] for row in allowed])
    states = torch.randn(POSITIONS, 8).bfloat16().float()
    head.weight.data = head.weight.data.bfloat16().float()
    temperatures = torch.rand(POSITIONS) + 0.5
    hidden = states.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropies = head_scores(head, traced(VOCABULARY), hidden, targets, temperatures, 5, limits)
        logits = head(states).float()
    logprobs.sum().backward()
    dense = ((logits + biases.float()) / temperatures[:, None]).masked_fill(~allowed, float("-inf"))
    expected = torch.distributions.Categorical(logits=dense)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected.log_prob(targets), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(entropies).all()
    forced = torch.from_numpy(limits.forced())
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert (hidden.grad[forced] == 0).all()
    onehot = nn.functional.one_hot(targets, VOCABULARY)
    of_logits = (onehot - expected.probs) / temperatures[:, None]
    torch.testing.assert_close(head.weight.grad, of_logits.T @ states, rtol=0.02, atol=0.02)


def test_bad_words_bar_what_a_plain_search_finds() -> None:
    rng = np.random.default_rng(0)
    words = [tuple(rng.integers(0, 4, size).tolist()) for size in (1, 2, 2, 3, 3, 3, 4, 5)] + [()]
    bad = BadWords(words)
    seen: set[frozenset[int]] = set()
    for size in (200, *[4] * 100):  # short ones too, in which most words begin with the first token
        ids = rng.integers(0, 4, size).astype(np.int32)
        barred = [set(bad.barred(nodes).tolist()) for nodes in bad.nodes(ids)]
        before = [ids[:place].tolist() for place in range(len(ids))]
        expected = [
            {word[-1] for word in words if word and past[len(past) - len(word) + 1 :] == list(word[:-1])}
            for past in before
        ]
        assert barred == expected
        seen |= {frozenset(tokens) for tokens in barred}
    assert len(seen) > 3


def test_thousands_of_bad_words_take_neither_time_nor_memory_at_each_token() -> None:
    """Words of one token and of the maximum length, all of which match throughout an answer."""
    words = [(token,) for token in range(2, 20_000)] + [(1,) * size for size in range(2, 65)]
    ids = np.ones(16_384, dtype=np.int32)

    def work() -> None:
        nodes = BadWords(words).nodes(ids)
        assert len(set(nodes)) == 64

    assert peak(work) < 64 * 2**20


@pytest.mark.parametrize(("forced", "means"), [((1, 1, 1, 0), (0.5, 0.8)), ((1, 1, 1, 1), (0.0, 0.0))])
def test_means_are_over_the_tokens_that_had_an_alternative(forced: tuple[int, ...], means: tuple[float, ...]) -> None:
    flags = torch.tensor(forced, dtype=torch.bool)
    zero = torch.zeros(4, dtype=torch.float64)
    logprobs, sampled, entropies = (zero.masked_fill(~flags, value) for value in (-1.5, -1.0, 0.8))
    sums = TokenSums.collect(
        [
            TokenSums.measure(
                logprobs,
                entropies,
                sampled=sampled,
                old=sampled,
                reference=None,
                advantages=torch.ones(4, dtype=torch.float64),
                calls=None,
                forced=flags,
                clip=(0.8, 1.2),
            )
        ]
    )
    assert (sums.tokens, sums.mean("abs_diff"), sums.mean("entropy")) == pytest.approx((4, *means))


def test_equal_limits_are_kept_once_and_small() -> None:
    table = LimitTable(VOCABULARY, max_bytes=40)
    few, many = allowing([1, 5]), allowing(list(range(60)))
    assert [table.add(few), table.add(many), table.add(few.copy()), table.add(few, ((1, 2.0),)), table.add(None)] == [
        *(0, 1, 0, 2, FREE)
    ]
    assert np.array_equal(table.masks([1, 0]), np.stack([many, few]))
    with pytest.raises(TooManyLimitsError):
        table.add(allowing(list(range(61))))
    assert table.add(many) == 1


def test_memory_of_masks_does_not_follow_the_number_of_positions() -> None:
    """A vocabulary of 152k and 512 positions with a different mask each, which would be 74 MiB as flags."""
    size, vocabulary = 512, 151_936
    rng = np.random.default_rng(0)
    table = LimitTable(vocabulary)
    masks = rng.integers(0, 2**32, (size, table.words), dtype=np.uint32) | 1
    limits = TokenLimits(table, np.array([table.add(mask, ((5, 1.0),)) for mask in masks], dtype=np.int32))
    logits = torch.ones(size, vocabulary)
    limits.select(slice(0, 16)).apply(logits[:16])
    assert peak(lambda: limits.apply(logits)) < 40 * 2**20
    assert (logits[:, 0] == 1).all()
    assert 0.45 < float((logits == -1e30).float().mean()) < 0.55
