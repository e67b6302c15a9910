"""Graders in the JSON format of OpenAI's reinforcement fine-tuning: their scores, and what is refused by name."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.agents.test_functions import rollouts
from tests.rollouts.conftest import Run
from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts.judges.choice import compares_rollouts, find_judge
from trainspan_rollouts.judges.judge import Result
from trainspan_schemas.errors import ConfigError, InvalidRecordError
from trainspan_schemas.telemetry import keys

OUTPUT = "{{ sample.output_text }}"
REFERENCE = "{{ item.reference_answer }}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(operation: str = "eq", text: str = OUTPUT, reference: str = REFERENCE, **more: Any) -> dict[str, Any]:
    return {"type": "string_check", "operation": operation, "input": text, "reference": reference, **more}


def python(source: str) -> dict[str, Any]:
    return {"type": "python", "source": source}


def multi(formula: str, **graders: dict[str, Any]) -> dict[str, Any]:
    return {"type": "multi", "graders": graders or {"a": check(), "b": check()}, "calculate_output": formula}


def verdict(grader: Any, value: Any, timeout_s: float = 20.0, **item: Any) -> Any:
    """The verdict on a function's value, whose task came from a row with these fields."""
    Path("grader.json").write_text(grader if isinstance(grader, str) else json.dumps(grader))
    task = {"id": "1", "input": "x", "meta": item}
    return find_judge("grader.json", timeout_s).function(task, Result("ok", value, "", None, 1.0, "r"))


def reward(grader: Any, value: Any, **item: Any) -> float:
    given = verdict(grader, value, **item)
    score = given[0] if isinstance(given, tuple) else given
    return float(score["reward"] if isinstance(score, dict) else score)


@pytest.mark.parametrize(
    ("operation", "value", "reference", "expected"),
    [
        ("eq", "Paris", "Paris", 1),
        ("eq", "paris", "Paris", 0),
        ("eq", "Paris ", "Paris", 0),
        ("ne", "paris", "Paris", 1),
        ("ne", "Paris", "Paris", 0),
        ("like", "It is Paris.", "Paris", 1),
        ("like", "It is paris.", "Paris", 0),
        ("ilike", "It is PARIS.", "paris", 1),
        ("ilike", "STRASSE", "straße", 1),
        ("ilike", "Rome", "Paris", 0),
        ("eq", 1.0, 1.0, 1),
        ("eq", {"b": 1, "a": "é"}, {"a": "é", "b": 1}, 1),
        ("eq", True, True, 1),
    ],
)
def test_texts_are_checked(operation: str, value: Any, reference: Any, expected: int) -> None:
    assert reward(check(operation), value, reference_answer=reference) == expected


def test_templates_take_values_from_row_and_answer_and_nothing_else() -> None:
    row = {"l": [1, {"k": "Z"}], "a b": {"c": "C"}, "secret": "S", "s": "{{ item.secret }}"}
    for path, text in {
        "item.l[1].k": "Z",
        "item['a b'].c": "C",
        "item.l": '[1, {"k": "Z"}]',
        "item.id": "1",
        "item.s": "{{ item.secret }}",  # what is filled in is no template
        "sample.output_json.x.y": "ü",
        "sample.choices[0].message.role": "assistant",
    }.items():
        # What is filled in is no template, so the expected text is filled in, too.
        filled = check(text=f"{OUTPUT}<{{{{{path}}}}}>", reference="{{ item.expected }}")
        assert reward(filled, {"x": {"y": "ü"}}, expected=f'{{"x": {{"y": "ü"}}}}<{text}>', **row) == 1, path
    assert reward(check(), "{{ item.reference_answer }}", reference_answer="S") == 0
    for path in ("item.s.__class__", "item.l.__len__", "item.l[7]", "item.missing"):
        with pytest.raises(InvalidRecordError, match="the task has no item"):
            verdict(check(text=f"{{{{ {path} }}}}", reference=OUTPUT), "x", **row)


@pytest.mark.parametrize("value", ["no json", '{"name": NaN}', '{"other": 1}', '{"name": null}', "[" * 10**5, None])
def test_what_the_answer_lacks_is_a_score_of_0_with_a_reason(value: Any) -> None:
    grader = check("ne", "{{ sample.output_json.name }}", "x")
    assert verdict(grader, value) == (0.0, "the answer has no output_json.name")


def test_a_template_that_grows_without_end_is_an_error() -> None:
    with pytest.raises(InvalidRecordError, match="has more than 16,777,216 characters"):
        verdict(check("eq", OUTPUT * 1000, "x"), "x" * 10**5)


def test_tool_calls_are_those_of_the_returned_messages() -> None:
    grader = multi(
        "0.5 * function_name + 0.5 * arguments",
        function_name=check("eq", "get_acceptors", "{{sample.output_tools[0].function.name}}"),
        arguments=check("eq", '{"smiles": "{{item.smiles}}"}', "{{sample.output_tools[0].function.arguments}}"),
    )
    call = {"id": "1", "type": "function", "function": {"name": "get_acceptors", "arguments": '{"smiles": "CO"}'}}
    value = {"answer": "", "messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]}
    assert [reward(grader, value, smiles=smiles) for smiles in ("CO", "CC")] == [1, 0.5]
    assert reward(grader, {"answer": "", "messages": []}, smiles="CO") == 0
    with pytest.raises(InvalidRecordError, match="the grader sees the tool calls, but the agent returned none"):
        verdict(grader, "text", smiles="CO")


def test_text_that_every_text_contains_is_no_reference() -> None:
    with pytest.raises(InvalidRecordError, match="the reference is empty, and every text contains it"):
        verdict(check("like"), "x", reference_answer="")
    assert reward(check("like", REFERENCE, OUTPUT), "", reference_answer="Paris") == 0  # an answer without words


@pytest.mark.parametrize(
    ("metric", "value", "reference", "expected"),
    [
        # The example of the guide: WRatio with the default processor.
        ("fuzzy_match", "fuzzy wuzzy was a bear", "fuzzy wuzzy had no hair", 0.7556),
        ("fuzzy_match", "!!!", "!!!", 1),
        # 2 of 5 words, 1 of 4 pairs: 2·P·R / (P + R)
        ("rouge_1", "fuzzy wuzzy was a bear", "fuzzy wuzzy had no hair", 0.4),
        ("rouge_2", "fuzzy wuzzy was a bear", "fuzzy wuzzy had no hair", 0.25),
        ("rouge_3", "fuzzy wuzzy was a bear", "fuzzy wuzzy had no hair", 0),
        ("rouge_l", "a b c d", "a x c d", 0.75),
        ("rouge_1", "Привет мир", "Привет, мир!", 1),
        # (2 + 1) of (5 + 4 + 3 + 2) groups of up to four words
        ("gleu", "fuzzy wuzzy was a bear", "fuzzy wuzzy had no hair", 3 / 14),
        ("bleu", "Paris", "Paris", 1),  # less than four words
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1),
        ("bleu", "", "the cat", 0),
    ],
)
def test_texts_are_compared_by_metrics(metric: str, value: str, reference: str, expected: float) -> None:
    grader = {"type": "text_similarity", "evaluation_metric": metric, "input": OUTPUT, "reference": REFERENCE}
    given = reward({**grader, "pass_threshold": 0.9}, value, reference_answer=reference)
    assert given == pytest.approx(expected, abs=1e-4)


def test_code_grades_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grade = "def grade(sample, item):\n    return "
    assert reward(python(grade + "len(sample['output_text']) / item['n']"), "ab", n=4) == 0.5
    assert reward(python(grade + "sample['output_json'] == [sample['choices'][0]['message']['content']]"), "[1]") == 0
    monkeypatch.setenv("JUDGE_SECRET", "key")
    (tmp_path / "secret").write_text("key")
    for source, message in {
        "1 / 0": "its code raised ZeroDivisionError: division by zero",
        "float('nan')": "the score is nan",
        "10**400": "OverflowError",
        "'1'": "grade returned '1', which is no number",
        "item['missing']": "KeyError",
        "sample['output_json']['x']": "TypeError",
        "sample['output_tools']": "KeyError",
        "exit()": "raised",
        "__import__('os')._exit(0)": "its process ended with exit code 0",
        "[0] * 10**11": "MemoryError",
        "__import__('os').environ['JUDGE_SECRET']": "KeyError",
        f"open({str(tmp_path / 'secret')!r}).read()": "PermissionError",
    }.items():
        with pytest.raises(InvalidRecordError, match=message.replace("(", r"\(")):
            verdict(python(grade + source), "no json")
    with pytest.raises(InvalidRecordError, match="it took longer than 1 s"):
        verdict(python("def grade(sample, item):\n    while True: pass"), "x", timeout_s=1)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("(a + b) / 2", 0.5),
        ("0.5*a + 0.25 * b", 0.5),
        ("-a^2 + 2^3^0 + 1", 2),
        ("min(a, b, 5) + max(a, b) + abs(-a)", 2),
        ("floor(1.5 * a) + ceil(0.1) + sqrt(4) + exp(b) + log(a)", 5),
        (" + ".join(["a"] * 200), 200),
    ],
)
def test_a_formula_combines_scores(formula: str, expected: float) -> None:
    scores, reasons = verdict(multi(formula, a=check(), b=check("ne")), "x", reference_answer="x")
    assert scores == {"reward": pytest.approx(expected), "a": 1, "b": 0}
    assert reasons == {"reward": "a 1; b 0: not ne: 'x' and 'x'", "b": "not ne: 'x' and 'x'"}


@pytest.mark.parametrize(
    ("formula", "expected"),
    [("1 - bad", 0), ("right - bad", -1), ("bad", 0), ("right * (1 - 0.5 * bad)", 0), ("3 - 2*bad + right", 1)],
)
def test_an_answer_that_a_formula_cannot_look_at_gets_the_least_of_it(formula: str, expected: float) -> None:
    """Else a policy could earn the most by an answer that is no JSON."""
    toxic = check("eq", "{{ sample.output_json.toxic }}", "yes")
    grader = multi(formula, bad=toxic, right=check("eq", "{{ sample.output_json.value }}"))
    assert reward(grader, "garbage", reference_answer="4") == expected
    assert reward(grader, '{"toxic": "yes", "value": "5"}', reference_answer="4") >= expected


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("1 - a * b", 0),
        ("1 - min(a, b)", 0),
        ("1 - max(0, a + b - 1)", 0),
        ("abs(a - b)", 0),
        ("1 / a", 1),  # at its other end it has no value
        ("1 - " + " * ".join(f"c{n}" for n in range(20)), 0),
    ],
)
def test_the_least_may_need_several_ends_together(formula: str, expected: float) -> None:
    names = ["a", "b"] if "a" in formula else [f"c{n}" for n in range(20)]
    toxic = {name: check("eq", f"{{{{ sample.output_json.{name} }}}}", "yes") for name in names}
    assert reward(multi(formula, **toxic), "garbage") == expected


def test_a_formula_without_a_value_at_any_end_is_an_error() -> None:
    with pytest.raises(InvalidRecordError, match="calculate_output of a = "):
        verdict(multi("1 / (a - a)", a=check("eq", "{{ sample.output_json.x }}", "yes")), "garbage")


@pytest.mark.parametrize("formula", ["1 / b", "9^9^9^9^9", "(b - 1)^0.5", "exp(1000)", "log(b)", "1e308 * 10"])
def test_a_formula_without_a_value_is_an_error(formula: str) -> None:
    with pytest.raises(InvalidRecordError, match="calculate_output of a = 0, b = 0"):
        verdict(multi(formula), "x", reference_answer="y")


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("[]", "has no type"),
        ("{", "is no JSON"),
        ("[" * 10**5, "is no JSON: maximum recursion depth"),
        ('{"type": "string_check", "type": "python"}', "a field occurs twice"),
        ('{"type": NaN}', "NaN is no JSON"),
        (" " * (2**20 + 1), "has more than 1 MiB"),
        ({"type": "exact"}, "no type 'exact'; there are string_check, text_similarity, python, score_model and multi"),
        ({"type": "label_model"}, "label_model is a grader of evals"),
        (check("gt"), "operation 'gt' is none of eq, ne, like, ilike"),
        (check(threshold=1), "has no field 'threshold'"),
        (check(reference="x", text="y"), "nothing in it looks at the answer"),
        (check(text=7), "input is no text"),  # type: ignore[arg-type]
        (check(reference="{{ config }}"), "reference: 'config' in {{ }} is no value"),
        (check(reference="{{ item }}"), "'item' in {{ }} is no value"),
        (check(reference="{{ item.a | upper }}"), "is no value"),
        (check(reference="{{ sample.output_audio }}"), "sample has output_text, output_json, output_tools, choices"),
        ({**check(), "type": "text_similarity", "evaluation_metric": "cosine"}, "has no field 'operation'"),
        ({"type": "text_similarity", "evaluation_metric": "cosine"}, "cosine compares embeddings of a hosted model"),
        (python("def grade(:"), "source is no Python"),
        (python("def score(sample, item): return 1"), "source has no function grade(sample, item)"),
        (multi("a.__class__"), "a formula has names of graders, numbers"),
        (multi("__import__('os')"), "a formula has names of graders, numbers"),
        (multi("a if b else 1"), "a formula has names of graders, numbers"),
        (multi("a + c"), "no grader 'c'; there are a, b"),
        (multi("a ** b"), "a power is written ^"),
        (multi("log(a, b)"), "log takes one value"),
        (multi("1e999"), "a number is too large"),
        (multi("9" * 1900), "a number is too large"),
        (multi("(" * 900 + "a" + ")" * 900), "is no formula"),
        (multi("-" * 1900 + "a"), "nested too deeply"),
        (multi("a" * 3000), "has 3000 characters"),
        (multi("a\x00\x1b[2J"), r"'a\x00\x1b[2J' is no formula"),
        (multi("a", a=multi("a")), "graders.a: a multi grader has no multi graders"),
        (multi("1", reward=check()), "is neither reward nor a function"),
        (multi("1", min=check()), "is neither reward nor a function"),
        (multi("g1", **{f"g{number}": check() for number in range(101)}), "has 101 graders; at most 100 are combined"),
        (python("x = " + "-" * 10**5 + "1\ndef grade(sample, item): return 1"), "source is no Python"),
    ],
)
def test_an_invalid_file_is_refused_before_anything_runs(grader: Any, message: str) -> None:
    Path("grader.json").write_text(grader if isinstance(grader, str) else json.dumps(grader))
    with pytest.raises(ConfigError) as raised:
        find_judge("grader.json", 1.0)
    assert str(raised.value).startswith("grader.json")
    assert message in str(raised.value)


def test_a_metric_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rapidfuzz", "nltk"):
        monkeypatch.setitem(sys.modules, module, None)
    for metric, module in (("fuzzy_match", "rapidfuzz"), ("rouge_l", "rapidfuzz"), ("bleu", "nltk")):
        grader = {"type": "text_similarity", "evaluation_metric": metric, "input": OUTPUT, "reference": REFERENCE}
        Path("grader.json").write_text(json.dumps(grader))
        with pytest.raises(ConfigError, match=f"{metric} needs {module}: pip install .*judges"):
            find_judge("grader.json", 1.0)
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read: No such file"):
        find_judge("nowhere.json", 1.0)


def score_model(url: str, **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You grade."},
        {"role": "user", "content": [{"type": "input_text", "text": f"{REFERENCE} or {OUTPUT}?"}]},
    ]
    return {"type": "score_model", "model": "o4", "input": messages, "base_url": url, **more}


def answered(result: object) -> str:
    return json.dumps({"steps": [{"description": "d", "conclusion": "close"}], "result": result})


def test_a_model_scores_within_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    with OpenAIServer(answer=lambda body: answered(float(body["messages"][1]["content"].split()[-1][:-1]))) as model:
        sampling = {"max_completions_tokens": 64, "seed": 3, "temperature": None}
        grader = score_model(model.url, range=[-1, 2], sampling_params=sampling, api_key_env="JUDGE_KEY")
        assert verdict(grader, "1.5", reference_answer="one") == (1.5, "close")
        assert verdict(grader, "7", reference_answer="one") == (2, "close")  # the guide: truncated to the range
        assert verdict(grader, "-7", reference_answer="one") == (-1, "close")
        assert find_judge("grader.json", 1.0).secrets == {"JUDGE_KEY"}
        first = model.requests[0]
    assert first.headers["authorization"] == "Bearer sk-1"
    assert first.body["messages"][1] == {"role": "user", "content": "one or 1.5?"}
    assert (first.body["max_completion_tokens"], first.body["seed"], "temperature" in first.body) == (64, 3, False)
    schema = first.body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["steps", "result"]


@pytest.mark.parametrize("answer", ["7", "so-so", answered("1"), answered(None), answered(True), '{"result": 1e999}'])
def test_a_model_that_gives_no_number_is_an_error_of_the_judge(answer: str) -> None:
    with OpenAIServer(answer=lambda _body: answer) as model, pytest.raises(InvalidRecordError):
        verdict(score_model(model.url), "x", reference_answer="y")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"base_url": "ftp://x"}, "base_url = 'ftp://x'"),
        ({"model": ""}, "has no model"),
        ({"range": [1, 0]}, "range = [1, 0]"),
        ({"range": [0, True]}, "range = [0, True]"),
        ({"range": [0, 10**400]}, "write the lowest and the highest score"),
        ({"sampling_params": {"top_k": 1}}, "sampling_params has no 'top_k'"),
        ({"input": []}, "input is a list of messages"),
        ({"input": [{"role": "tool", "content": OUTPUT}]}, "role 'tool' is none of"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "images and audio are not graded"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY with the judge's key is not set"),
    ],
)
def test_an_invalid_model_is_refused(more: dict[str, Any], message: str) -> None:
    Path("grader.json").write_text(json.dumps({**score_model("http://127.0.0.1:9/v1"), **more}))
    with pytest.raises(ConfigError) as raised:
        find_judge("grader.json", 1.0)
    assert message in str(raised.value)
    del (grader := score_model(""))["base_url"]
    Path("grader.json").write_text(json.dumps(grader))
    with pytest.raises(ConfigError, match='does not say where its model is: add "base_url"'):
        find_judge("grader.json", 1.0)


def test_a_grader_judges_the_rows_of_a_fine_tuning_file(run: Run, recorder: OtlpRecorder) -> None:
    source = """
    def solve(task):
        (message,) = task["input"]["messages"]
        return {"name": message["content"]} if message["content"] != "?" else "I do not know."
    """
    Path("grader.json").write_text(
        json.dumps(
            multi(
                "(name + known) / 2",
                name=check("eq", "{{sample.output_json.name}}", "{{item.name}}"),
                known=check("ne", OUTPUT, "I do not know."),
            )
        )
    )
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": content}], **more}
        for content, more in (("Ann", {"name": "Ann"}), ("Tom", {"name": "Bob"}), ("?", {"name": "Eva"}), ("X", {}))
    ]
    result = run(source, rows, "agent:solve", judge="grader.json")
    assert (result.status, result.mean_reward) == ({"judge_error": 1, "ok": 3}, 0.5)
    events = [event for span in rollouts(recorder).values() for _, event in span.events]
    scores = sorted((event[keys.EVALUATION_NAME], event[keys.EVALUATION_SCORE]) for event in events)
    assert scores == [
        *(("known", 0.0), ("known", 1.0), ("known", 1.0)),
        *(("name", 0.0), ("name", 0.0), ("name", 1.0)),
        *(("reward", 0.0), ("reward", 0.5), ("reward", 1.0)),
    ]
    assert not compares_rollouts("grader.json")
