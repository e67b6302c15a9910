"""A swap at several policy servers: at all of them, or at none; whoever does not answer is left out."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.training.support.swap_server import PolicyServer, policy_server
from trainspan_schemas.policy_server import Offer
from trainspan_training.checkpoints.replica_swap import publish, served_folders
from trainspan_training.checkpoints.swap_request import PolicyAddress, Swap

pytestmark = pytest.mark.usefixtures("home")

STAGED = (200, {"staged": "policy-000002", "version": 2})
SWAPPED = (200, {"version": 2, "canary": {"status": "fresh"}})
REFUSED = (409, {"error": "the engine is not serving it", "reason": "canary_failed"})
UNFIT = (400, {"error": "tensor 'x' is missing", "reason": "unfit"})
BACK = (200, {"version": 1, "canary": {"status": "fresh"}})
BEFORE = {"checkpoint": "policy-000001", "version": 1, "weights_sha256": "1a" * 32, "base": "base"}
NOT_COPIED = (503, {"error": "no room", "reason": "copy_failed"})
OFFER = Offer("policy-000002", 2, "2b" * 32)
ACCEPTED = Offer("policy-000001", 1, "1a" * 32)


@contextlib.contextmanager
def replicas(*answers: tuple[tuple[int, dict[str, Any]], ...]) -> Iterator[list[PolicyServer]]:
    """Servers with these answers to POST requests, in turn, and version 1 in service."""
    with contextlib.ExitStack() as running:
        servers = [running.enter_context(policy_server(*own)) for own in answers]
        for server in servers:
            server.state = dict(BEFORE)
        yield servers


def ask(*urls: str) -> Swap:
    return publish(PolicyAddress(",".join(urls)), OFFER, ACCEPTED, retry_for_s=2.0, was_there=True)


def requests_of(server: PolicyServer) -> list[tuple[str, str]]:
    return [(path.removeprefix("/trainspan/"), body["checkpoint"]) for path, _, body in server.asked]


STAGE, SWAP, UNDO = ("stage", "policy-000002"), ("policy", "policy-000002"), ("policy", "policy-000001")


def test_all_servers_stage_the_checkpoint_before_one_swaps() -> None:
    with replicas((STAGED, SWAPPED), (STAGED, SWAPPED)) as servers:
        swap = ask(*(server.url for server in servers))
    assert swap.outcome == "swapped"
    assert swap.answer is not None
    assert swap.answer["canary"] == {"status": "fresh"}
    assert swap.answer["servers"] == {server.url: {"outcome": "swapped", "error": None} for server in servers}
    assert [requests_of(server) for server in servers] == [[STAGE, SWAP]] * 2
    assert all(authorization for server in servers for _, authorization, _ in server.asked)


def outcomes(swap: Swap) -> list[str]:
    assert swap.answer is not None
    return [one["outcome"] for one in swap.answer["servers"].values()]


def test_a_checkpoint_that_does_not_fit_one_server_touches_none() -> None:
    with replicas((STAGED, SWAPPED), (UNFIT,)) as servers:
        swap = ask(*(server.url for server in servers))
    assert (swap.outcome, swap.error) == ("unfit", f"{servers[1].url}: tensor 'x' is missing")
    assert outcomes(swap) == ["staged", "unfit"]
    assert [requests_of(server) for server in servers] == [[STAGE], [STAGE]]


def test_a_server_that_cannot_copy_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with replicas((NOT_COPIED,), (STAGED, SWAPPED)) as servers:
        swap = ask(*(server.url for server in servers))
    assert (swap.outcome, outcomes(swap)) == ("swapped", ["failed", "swapped"])
    assert f"server={servers[0].url} outcome=failed: no room" in caplog.text


SERVES_IT = {"checkpoint": "policy-000002", "version": 2, "weights_sha256": "2b" * 32, "base": "base"}
NO_ANSWER = (500, {"error": "the answer was lost"})


def test_a_server_that_serves_a_refused_checkpoint_from_before_goes_back_to_the_accepted_one() -> None:
    with replicas((STAGED, NO_ANSWER, BACK), (STAGED, REFUSED)) as servers:
        servers[0].state = dict(SERVES_IT)
        swap = ask(*(server.url for server in servers))
    assert (swap.outcome, outcomes(swap)) == ("refused", ["failed", "refused"])
    assert [requests_of(server) for server in servers] == [[STAGE, SWAP, UNDO], [STAGE, SWAP]]
    assert servers[0].asked[-1][2] == {"checkpoint": "policy-000001", "version": 1, "weights_sha256": "1a" * 32}


def test_a_single_server_that_serves_a_refused_checkpoint_from_before_goes_back_too() -> None:
    with replicas((REFUSED, BACK)) as servers:
        servers[0].state = dict(SERVES_IT)
        assert ask(servers[0].url).outcome == "refused"
    assert requests_of(servers[0]) == [SWAP, UNDO]


def test_no_server_is_sent_back_to_the_refused_checkpoint_or_from_another_of_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with replicas((STAGED, REFUSED), (STAGED,), (STAGED,)) as servers:
        servers[1].state = dict(SERVES_IT)
        servers[2].state = {**SERVES_IT, "weights_sha256": "of another run"}
        address = PolicyAddress(",".join(server.url for server in servers))
        assert publish(address, OFFER, None, retry_for_s=2.0, was_there=True).outcome == "refused"
    assert [requests_of(server) for server in servers] == [[STAGE, SWAP], [STAGE], [STAGE]]
    assert f"server={servers[1].url} stays with refused checkpoint=policy-000002" in caplog.text
    assert f"server={servers[2].url} stays" not in caplog.text


def test_a_checkpoint_that_the_first_canary_refuses_reaches_no_other_server() -> None:
    with replicas((STAGED, REFUSED), (STAGED, SWAPPED)) as servers:
        swap = ask(*(server.url for server in servers))
    assert swap.outcome == "refused"
    assert [requests_of(server) for server in servers] == [[STAGE, SWAP], [STAGE]]


def test_a_checkpoint_that_a_later_canary_refuses_is_taken_out_everywhere() -> None:
    with replicas((STAGED, SWAPPED, BACK), (STAGED, SWAPPED, BACK), (STAGED, REFUSED)) as servers:
        swap = ask(*(server.url for server in servers))
    assert (swap.outcome, swap.error) == ("refused", "the engine is not serving it")
    assert [requests_of(server) for server in servers] == [[STAGE, SWAP, UNDO]] * 2 + [[STAGE, SWAP]]
    assert [body["version"] for _, _, body in servers[0].asked] == [2, 2, 1]
    assert outcomes(swap) == ["refused"] * 3


@pytest.mark.parametrize(("answer", "outcome"), [(SWAPPED, "refused"), (NO_ANSWER, "failed")])
def test_a_server_that_misses_one_question_is_still_taken_back(
    answer: tuple[int, dict[str, Any]], outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose answer to the swap was lost: it may serve the checkpoint."""
    with replicas((STAGED, answer, BACK), (STAGED, REFUSED)) as servers:
        servers[0].state = dict(SERVES_IT)
        servers[1].on_refusal = lambda: setattr(servers[0], "silent", 1)
        swap = ask(*(server.url for server in servers))
        assert servers[0].silent == 0
    assert (swap.outcome, outcomes(swap)) == ("refused", [outcome, "refused"])
    assert requests_of(servers[0]) == [STAGE, SWAP, UNDO]
    assert "stays" not in caplog.text


def test_a_server_that_comes_back_during_the_swap_takes_part() -> None:
    with replicas((STAGED, SWAPPED), (SWAPPED,)) as servers:
        servers[1].silent = 1
        swap = ask(*(server.url for server in servers))
    assert (swap.outcome, outcomes(swap)) == ("swapped", ["swapped", "swapped"])
    assert [requests_of(server) for server in servers] == [[STAGE, SWAP], [SWAP]]


def test_if_all_servers_restart_they_are_waited_for() -> None:
    with replicas((STAGED, SWAPPED), (STAGED, SWAPPED)) as servers:
        for server in servers:
            server.silent = 1
        swap = ask(*(server.url for server in servers))
    assert (swap.outcome, outcomes(swap)) == ("swapped", ["swapped", "swapped"])


def test_a_server_without_the_policy_is_named_with_its_own_words() -> None:
    with replicas((STAGED, SWAPPED), ((400, {"error": "no policy 'writer': this server has only one"}),)) as servers:
        servers[0].state = {"policies": {"writer": dict(BEFORE)}, "changing": False}
        address = PolicyAddress(",".join(server.url for server in servers), "writer")
        swap = publish(address, OFFER, ACCEPTED, retry_for_s=2.0, was_there=True)
    assert swap.left_out == {servers[1].url: "no policy 'writer': this server has only one"}


def test_a_server_that_does_not_answer_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    with replicas((STAGED, SWAPPED)) as servers:
        swap = ask(away, servers[0].url)
        assert served_folders(PolicyAddress(f"{away},{servers[0].url}")) == {"policy-000002", "base"}
    assert swap.outcome == "swapped"
    assert swap.answer is not None
    assert swap.answer["servers"][away]["outcome"] == "unreachable"
    assert f"server={away} outcome=unreachable" in caplog.text


def test_if_no_server_answers_the_checkpoint_is_not_in_service() -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    swap = ask(*urls)
    assert swap.outcome == "unreachable"
    assert urls[0] in str(swap.error)


def test_a_first_server_that_fails_does_not_keep_the_others_from_swapping() -> None:
    with replicas((STAGED, (500, {"error": "out of memory", "reason": "load_failed"})), (STAGED, SWAPPED)) as servers:
        swap = ask(*(server.url for server in servers))
    assert swap.outcome == "swapped"
    assert swap.answer is not None
    assert [one["outcome"] for one in swap.answer["servers"].values()] == ["failed", "swapped"]
