"""The output head in chunks: same scores and gradients, whatever a model does with its logits, in bounded memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.support.memory_use import peak
from trainspan_training.objective import head as head_module
from trainspan_training.objective.head import CHUNK, Traced, head_scores
from trainspan_training.objective.logprobs import Probe, Scores, score

VOCABULARY = 151_936


def architectures() -> dict[str, Any]:
    """Models that scale or cap their logits after the head, with head and embeddings tied and untied."""
    from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        "plain": LlamaConfig(**shape, tie_word_embeddings=False),
        "tied": LlamaConfig(**shape, tie_word_embeddings=True),
        "scaled": CohereConfig(**shape, logit_scale=0.25),
        "divided": GraniteConfig(**shape, logits_scaling=3.0),
        "capped": Gemma2Config(**shape, final_logit_softcapping=2.0),
    }


def plainly(model: Any, tokens: Tensor, predicting: Tensor, targets: Tensor, temperatures: Tensor) -> Scores:
    """Scores from all logits at once, as the model returns them."""
    logits = model(input_ids=tokens).logits.flatten(0, 1)[predicting].float() / temperatures[:, None]
    distribution = torch.distributions.Categorical(logits=logits)
    return Scores(distribution.log_prob(targets), distribution.entropy().detach())


def problem(size: int = 23) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 97, (2, 16), generator=generator)
    predicting = torch.randint(0, 32, (size,), generator=generator)
    targets = torch.randint(0, 97, (size,), generator=generator)
    return tokens, predicting, targets, torch.rand(size, generator=generator) + 0.5


@pytest.mark.parametrize("positions", [0, 5, 23])
def test_hooks_of_the_head_see_one_forward_pass_for_any_number_of_chunks(positions: int) -> None:
    """FSDP's hooks fetch weights per pass they saw; processes with different numbers of passes would deadlock."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(architectures()["plain"])
    seen: list[str] = []
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.lm_head.register_forward_hook(lambda *_: seen.append("after"))
    score(model, model, *problem(positions), chunk=5 * 97).logprobs.sum().backward()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("name", ["plain", "tied", "scaled", "divided", "capped"])
@pytest.mark.parametrize("adapter", [False, True])
def test_chunks_give_scores_and_gradients_of_the_whole(name: str, adapter: bool) -> None:
    """Chunks of five positions; the adapter targets the head too."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(architectures()[name])
    if adapter:
        beside = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(model, beside)
    model.eval()
    found = []
    for way in (plainly, lambda model, *rest: score(model, model, *rest, chunk=5 * 97)):
        model.zero_grad()
        scores = way(model, *problem())
        (scores.logprobs * torch.linspace(-1, 1, 23)).sum().backward()
        found.append((scores, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (plain, expected), (chunked, gradients) = found
    torch.testing.assert_close(chunked.logprobs, plain.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chunked.entropies, plain.entropies, rtol=1e-5, atol=1e-5)
    assert not chunked.entropies.requires_grad
    assert gradients.keys() == expected.keys()
    assert ("lora" in "".join(gradients)) is adapter
    scale = max(float(value.abs().max()) for value in expected.values())
    for parameter, value in expected.items():
        assert float((gradients[parameter] - value).abs().max()) < 1e-5 * scale, parameter
    with torch.no_grad():
        assert torch.equal(score(model, model, *problem(), chunk=5 * 97).logprobs, chunked.logprobs.detach())


@pytest.mark.parametrize("name", ["plain", "tied", "scaled", "capped"])
def test_a_probe_gets_the_gradient_of_each_log_probability_by_its_hidden_state(name: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architectures()[name]).eval()
    tokens, predicting, targets, temperatures = problem()
    some, received = torch.tensor([4, 0, 17]), []
    with torch.no_grad():
        score(
            model,
            model,
            tokens,
            predicting,
            targets,
            temperatures,
            chunk=200,
            probe=Probe(some, lambda *got: received.append(got)),
        )
    hidden, gradients = received[0]
    states = model.model(input_ids=tokens).last_hidden_state.flatten(0, 1)
    expected = []
    for index in some.tolist():
        state = states[predicting[index]].detach().requires_grad_()
        logits = model.lm_head(state)
        if name == "scaled":
            logits = logits * model.config.logit_scale
        if name == "capped":
            logits = 2 * torch.tanh(logits / 2)
        torch.log_softmax(logits / temperatures[index], dim=0)[targets[index]].backward()
        expected.append(state.grad)
    torch.testing.assert_close(hidden, states[predicting[some]].detach())
    torch.testing.assert_close(gradients, torch.stack(expected))


def test_chunks_in_bfloat16_are_added_up_in_float32() -> None:
    """A head with bfloat16 weights over 512 chunks: a sum in bfloat16 would lose each chunk's contribution."""
    torch.manual_seed(0)
    hidden, size = 16, 512
    head = nn.Linear(hidden, 64, bias=False)
    states, targets = torch.rand(size, hidden) + 1, torch.zeros(size, dtype=torch.int64)
    gradients = {}
    for name, rows, bf16 in (("exact", size, False), ("whole", size, True), ("chunks", 1, True)):
        head.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logprobs, _ = head_scores(head, _traced(64), states, targets, torch.ones(size), rows)
        logprobs.sum().backward()
        assert head.weight.grad is not None
        gradients[name] = head.weight.grad
        assert gradients[name].dtype == torch.float32
    off = {name: float((gradients[name] - gradients["exact"]).abs().max()) for name in ("whole", "chunks")}
    assert 0 < off["chunks"] < 1.5 * off["whole"]


def test_no_position_gives_a_gradient_of_zero_everywhere() -> None:
    """As forwarded by a process without rows left: the others wait for its gradients."""
    head = nn.Linear(4, 9)
    states = torch.rand(3, 4, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    logprobs, _ = head_scores(head, _traced(9), states[:0], nothing, torch.ones(0), 2)
    logprobs.sum().backward()
    assert [float(p.grad.abs().max()) for p in (states, *head.parameters()) if p.grad is not None] == [0, 0, 0]


@pytest.mark.ci
@pytest.mark.parametrize("bf16", [False, True])
def test_memory_does_not_follow_the_number_of_positions(bf16: bool) -> None:
    """1,024 positions at a vocabulary of 152k in chunks of 16: one float32 copy of all logits would be 594 MiB."""
    assert peak_of(1024, rows=16, bf16=bf16) < 1024 * VOCABULARY * 4 / 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bf16", [False, True])
def test_sixteen_thousand_tokens_of_a_large_vocabulary_take_little_more_than_a_chunk(bf16: bool) -> None:
    """A chunk is 256 MiB in float32; all logits would be 9.3 GiB. In bfloat16 a CPU multiplies what it converts back."""
    assert peak_of(16_384, rows=CHUNK // VOCABULARY, bf16=bf16) < (544 if bf16 else 416) << 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_for_a_gpu_the_passes_over_logits_give_the_same(dtype: torch.dtype) -> None:
    """For two numbers of positions: the second is not compiled again."""
    for size in (6, 9):
        logits = (3 * torch.randn(size, 1000)).to(dtype)
        targets, temperatures = torch.arange(size), torch.rand(size) + 0.5
        found = [
            function(logits.clone(), targets, temperatures)
            for function in (head_module._statistics, head_module._compiled(head_module._statistics, "cuda"))
        ]
        for plain, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
        slopes = [logits.clone(), logits.clone()]
        make = head_module._make_slopes
        for function, values in zip((make, head_module._compiled(make, "cuda")), slopes, strict=True):
            function(values, temperatures, torch.ones(size), found[0][2])
        torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert float(slopes[0].sum(dim=1).add(1).abs().max()) < 0.02, "shares add up to 1"


def peak_of(size: int, *, rows: int, bf16: bool) -> int:
    """Peak bytes of a forward and backward pass over this many positions, with the gradient of a head of width 16."""
    head = nn.Linear(16, VOCABULARY, bias=False)
    states = torch.randn(size, 16, requires_grad=True)
    targets = torch.arange(size)

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logprobs, _ = head_scores(head, _traced(VOCABULARY), states, targets, torch.ones(size), rows)
        logprobs.sum().backward()

    return peak(work)


def _traced(vocabulary: int) -> Traced:
    """Traces a model that does nothing with its logits."""
    return torch.empty(1, 0, vocabulary).as_subclass(Traced)
