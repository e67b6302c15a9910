"""A gate's pages: what they say, and that text from outside cannot change them."""

from dataclasses import replace
from xml.etree import ElementTree as ET

from trainspan_cli.gate.pages import junit_xml, markdown
from trainspan_cli.gate.tripwires import REFUSAL
from trainspan_schemas.artifacts.gate_result import GateResult, GateSide, TaskDecline, Tripwire
from trainspan_schemas.command_events import event_line, parse

RESULT = GateResult(
    *("g", "no decline", "no decline found: reward 0.500 → 0.480 on 50 of 50 tasks, level 0.05", 0.05, 1, 50, 50),
    GateSide("http://old/v1", 50, 0.5, (0.366, 0.634), 0, {}),
    GateSide("http://new/v1", 50, 0.48, (0.348, 0.615), 2, {"infra_error": 1}),
    *(-0.02, (-0.13, 0.09), 0.151, 1.2, 33.3, 0.4, None),
    (
        Tripwire("answer tokens per rollout", 20.0, 65.5, flagged=True, p=0.002),
        Tripwire("refusals", None, None, unknown="no text of both sides is recorded or can be decoded"),
        Tripwire("left-out rollouts", 0.0, 0.02, p=1.0),
    ),
    (TaskDecline("a|b", 1.0, 0.0),),
    2.5,
)


def test_the_page_has_the_verdict_first_and_warns_of_tripwires() -> None:
    page = markdown(RESULT)
    assert page.startswith("**no decline** · no decline found: reward 0.500 → 0.480 on 50 of 50 tasks, level 0.05\n")
    for line in (
        "| server | `http://old/v1` | `http://new/v1` |",
        "| mean reward | `0.500 [0.366, 0.634]` | `0.480 [0.348, 0.615]` |",
        "| failed or timed out | `0` | `2` |",
        "| left out | `0` | `1 infra_error` |",
        "- mean difference over tasks: -0.020 [-0.130, +0.090]",
        "- evidence of a decline: 1.2; 33.3 decides at level 0.05",
        "- all tasks: reward p = 0.4",
        "- about 4 of 5 gates like this find a mean fall of 0.151, if it is of rollouts that get the least reward",
        "| answer tokens per rollout | 20 | 65.5 | differs beyond noise (p = 0.002) |",
        "| `a\\|b` | 1.000 | 0.000 |",
    ):
        assert line in page.splitlines(), line


def test_a_ci_system_sees_one_case_for_the_verdict_and_warnings_as_skipped() -> None:
    suite = ET.fromstring(junit_xml(RESULT))[0]
    figures = [suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")]
    assert figures == ["4", "0", "0", "2", "2.500"]
    assert [[child.tag for child in case] for case in suite] == [
        ["system-out"],
        ["skipped"],
        ["skipped"],
        ["system-out"],
    ]
    for verdict, tag in (("worse", "failure"), ("no verdict", "error")):
        case = ET.fromstring(junit_xml(replace(RESULT, verdict=verdict)))[0][0]  # type: ignore[arg-type]
        assert [child.tag for child in case] == [tag, "system-out"]


def test_hostile_text_stays_text() -> None:
    text = 'x`|\n<script>\x00\ud800" ]]> @all'
    hostile = replace(RESULT, reason=text, declines=(TaskDecline(text, 1.0, 0.0),))
    page = markdown(hostile)
    assert "<script>" not in page.replace("`x'\\| <script>", "")
    assert "\\@all" in page
    assert page.encode()
    case = ET.fromstring(junit_xml(replace(hostile, verdict="worse")))[0][0]
    assert case[0].get("message") == 'x`|\n<script>\ufffd\ufffd" ]]> @all'


def test_a_program_reads_back_the_same_result() -> None:
    assert parse(event_line(RESULT)) == RESULT


def test_openings_of_refusals_are_told_from_answers() -> None:
    refusals = [
        "I'm sorry, but I can't help.",
        "Sorry, no.",
        "  As an AI, I",
        "I cannot",
        "Unfortunately, I won't",
        "I’m unable to",
    ]
    answers = ["I can do that", "The answer is sorry", "Sorrytown", "I wonder", "42", ""]
    assert [text for text in refusals if not REFUSAL.match(text)] == []
    assert [text for text in answers if REFUSAL.match(text)] == []
