"""Deterministic judges by name: `KIND:FIELD[,OPTION=VALUE]…`, such as `exact:answer` or `sql:meta.query,db=shop.sqlite`.

FIELD is the task's `answer`, or `meta.NAME`, with what is right, or a list of right answers. The reward is 1 or 0, with a reason
for 0. A task without the field, or with one that cannot be used, is an error of the judge.
"""

import hashlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainspan_rollouts.judges import answers, child, comparisons, sandbox
from trainspan_rollouts.judges.answers import answer_text, code_of, conversation, final_answer
from trainspan_rollouts.judges.judge import JudgeFunction, Result
from trainspan_schemas.errors import InvalidRecordError, UsageError, pip_install
from trainspan_schemas.telemetry.keys import REWARD

__all__ = ["NAMED", "named_judge"]

_TIMEOUT_S: Final = 10.0
_FIELD: Final = re.compile(r"answer|meta(\.[^.,=:]+)*")
_PLACE: Final = re.compile(r"\{(meta(?:\.[^.{}]+)*)\}")
_DUCKDB: Final = slice(8, 12)
"""Where a DuckDB file has the bytes DUCK."""

_DUCKDB_READS: Final = (Path("/proc/self"), Path("/sys/fs/cgroup"))
"""Where it looks for the limits of its memory."""

_Verdict = float | tuple[float | dict[str, float], str]
_Options = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Kind:
    verdict: Callable[[Any, Mapping[str, Any], Result, _Options], _Verdict]
    """Of the field's value, task, result and options."""
    options: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    """Name → what raises ValueError for a bad value."""
    needed: Sequence[str] = ()
    """Options without which there is no judge."""
    module: str | None = None


def named_judge(name: str, timeout_s: float) -> JudgeFunction:
    """Returns the judge of that name. Raises UsageError if the name is malformed or the judge cannot run here."""
    kind_name, _, rest = name.partition(":")
    kind, (field_path, *parts) = NAMED[kind_name], rest.split(",")
    if not _FIELD.fullmatch(field_path):
        raise UsageError(
            f"--judge {name}: {field_path!r} is no field of a task: write {kind_name}:answer or {kind_name}:meta.NAME, or "
            f"{kind_name}.py:{field_path or 'FUNCTION'} for a function of a file"
        )
    options = {option: value for option, _, value in (part.partition("=") for part in parts)}
    for option, value in options.items():
        if option not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise UsageError(f"--judge {name}: {kind_name} has no option {option!r}; it has {known}")
        try:
            kind.options[option](value)
        except (ValueError, ZeroDivisionError):
            raise UsageError(f"--judge {name}: {option}={value} cannot be used; see docs/rewards.md") from None
    if missing := [option for option in kind.needed if option not in options]:
        raise UsageError(
            f"--judge {name}: {kind_name} needs {missing[0]}=…, as in {kind_name}:answer,{missing[0]}=FILE"
        )
    if (database := options.get("db")) and not _PLACE.search(database) and not Path(database).is_file():
        raise UsageError(f"--judge {name}: no database {database}")
    if kind.module and importlib.util.find_spec(kind.module) is None:
        raise UsageError(f"--judge {name}: {kind_name} needs {kind.module}: {pip_install('judges')}")
    if kind_name == "tests" and sandbox.landlock_abi() < sandbox.LEAST_ABI:
        raise UsageError(f"--judge {name}: the kernel cannot confine code (Landlock, Linux 6.7 or later)")
    limited = {"timeout": str(min(_TIMEOUT_S, timeout_s)), **options}
    return JudgeFunction(name, partial(_judge, kind, field_path, limited), _digest(name))


def _digest(name: str) -> str:
    sources = (__file__, answers.__file__, child.__file__, comparisons.__file__, sandbox.__file__)
    files = (Path(each) for each in sources)
    return hashlib.sha256(name.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()


def _judge(kind: _Kind, field_path: str, options: _Options, task: Mapping[str, Any], result: Result) -> _Verdict:
    right = _at(task, field_path)
    if right is None:
        raise InvalidRecordError(f"the task has no {field_path}")
    try:
        return kind.verdict(right, task, result, options)
    except RecursionError:  # a task's own values are checked when its file is read
        return 0.0, "the answer is nested too deeply"


def _at(task: Mapping[str, Any], field_path: str) -> Any:
    value: Any = task
    for name in field_path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _verdict(differences: Sequence[str | None]) -> _Verdict:
    """1 if there is no difference to one of the right answers, else 0 with the difference to the first."""
    return 1.0 if None in differences else (0.0, str(differences[0]))


def _several(right: Any) -> list[Any]:
    """The right answers. Raises InvalidRecordError if there is none."""
    if right == []:
        raise InvalidRecordError("the task's list of right answers is empty")
    return right if isinstance(right, list) else [right]


def _texts(right: Any) -> list[str]:
    texts = _several(right)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRecordError(f"{right!r:.80} is no text")
    return texts


def _exact(right: Any, _task: Mapping[str, Any], result: Result, options: _Options) -> _Verdict:
    compare = partial(comparisons.differing_text, answer=final_answer(result), ignore_case="case" in options)
    whole = [right] if isinstance(final_answer(result), list) else []
    return _verdict([compare(each) for each in (*whole, *_several(right))])


def _numeric(right: Any, _task: Mapping[str, Any], result: Result, options: _Options) -> _Verdict:
    tolerance = comparisons.Tolerance.parse(options["tolerance"]) if "tolerance" in options else comparisons.Tolerance()
    answer = final_answer(result)
    return _verdict([comparisons.differing_number(each, answer, tolerance) for each in _several(right)])


def _tool_call(right: Any, _task: Mapping[str, Any], result: Result, _options: _Options) -> _Verdict:
    try:
        wanted = comparisons.tool_calls(comparisons.parse_json(right) if isinstance(right, str) else right)
    except ValueError as error:
        raise InvalidRecordError(f"the task's tool calls cannot be read: {error}") from error
    messages = conversation(result)
    try:
        if messages is not None:
            calls = [
                call
                for message in messages
                for call in comparisons.tool_calls({"tool_calls": message.get("tool_calls")})
            ]
        else:
            answer = final_answer(result)
            calls = comparisons.tool_calls(code_of(answer) if isinstance(answer, str) else answer)
    except ValueError as error:
        return 0.0, f"its tool calls cannot be read: {error}"
    return _verdict([comparisons.differing_calls(wanted, calls)])


def _tried(
    kind: str, payload: Mapping[str, Any], options: _Options, expected: int = 1, readable: Sequence[Path] = ()
) -> list[str | None]:
    return child.outcomes(kind, payload, expected, float(options["timeout"]), readable)


def _regex(right: Any, _task: Mapping[str, Any], result: Result, options: _Options) -> _Verdict:
    return _verdict(_tried("regex", {"right": _texts(right), "answer": answer_text(result)}, options))


def _json_schema(right: Any, _task: Mapping[str, Any], result: Result, options: _Options) -> _Verdict:
    try:
        schemas = [comparisons.parse_json(each) if isinstance(each, str) else each for each in _several(right)]
    except ValueError as error:
        raise InvalidRecordError(f"the task's schema is no JSON: {error}") from error
    answer = final_answer(result)
    try:
        value = comparisons.parse_json(code_of(answer)) if isinstance(answer, str) else answer
    except ValueError as error:
        return 0.0, f"the answer is no JSON: {error}"
    return _verdict(_tried("json_schema", {"right": schemas, "answer": value}, options))


def _sql(right: Any, task: Mapping[str, Any], result: Result, options: _Options) -> _Verdict:
    database = Path(_PLACE.sub(lambda match: str(_at(task, match[1])), options["db"])).resolve()
    try:
        with database.open("rb") as file:
            is_duckdb = file.read(12)[_DUCKDB] == b"DUCK"
    except OSError as error:
        raise InvalidRecordError(f"the database {database} cannot be read: {error.strerror}") from error
    payload = {
        "right": _texts(right),
        "answer": code_of(answer_text(result)),
        "database": str(database),
        "is_duckdb": is_duckdb,
    }
    files = [database, *(database.with_name(database.name + end) for end in ("-wal", "-shm", ".wal"))]
    return _verdict(_tried("sql", payload, options, readable=[*files, *_DUCKDB_READS]))


def _tests(right: Any, _task: Mapping[str, Any], result: Result, options: _Options) -> _Verdict:
    tests = _texts(right)
    payload = {"right": tests, "answer": code_of(answer_text(result))}
    failures = [failure for failure in _tried("tests", payload, options, len(tests)) if failure is not None]
    scores = {REWARD: float(not failures), "passed": 1 - len(failures) / len(tests)}
    return scores, failures[0] if failures else f"{len(tests)} passed"


def _seconds(text: str) -> None:
    if not 0 < float(text) <= 3600:
        raise ValueError(text)


def _only(*values: str) -> Callable[[str], object]:
    return values.index


_LIMITED: Final = {"timeout": _seconds}

NAMED: Final[Mapping[str, _Kind]] = {
    "exact": _Kind(_exact, {"case": _only("ignore")}),
    "numeric": _Kind(_numeric, {"tolerance": comparisons.Tolerance.parse}),
    "regex": _Kind(_regex, _LIMITED),
    "json_schema": _Kind(_json_schema, _LIMITED, module="jsonschema"),
    "sql": _Kind(_sql, {"db": str, **_LIMITED}, needed=("db",)),
    "tests": _Kind(_tests, _LIMITED),
    "tool_call": _Kind(_tool_call),
}
"""The judges by name."""
