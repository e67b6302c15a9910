"""The program of a process in which an answer is tried: it matches patterns, checks schemas, runs queries, tests or graders.

It is started as a file, imports nothing of trainspan, reads one JSON object from standard input, and writes an outcome per line.
Before it looks at the answer it gives up what it may do: files other than those named, TCP, and signals to other processes
(Landlock, https://docs.kernel.org/userspace-api/landlock.html), memory, processor time, files' size, and children (setrlimit(2)).
"""

import contextlib
import ctypes
import inspect
import json
import numbers
import os
import re
import resource
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

MAX_ROWS: Final = 10_000
_MAX_FILE_BYTES: Final = 2**24
_MAX_OUTCOME: Final = 500

# Landlock: system calls, rights of files, of the network, and scopes (linux/landlock.h).
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION: Final = 1
_EXECUTE, _WRITE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_ALL_OF_ABI: Final = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
_OF_FILES: Final = 0x1 | 0x2 | 0x4 | 0x4000 | 0x8000
_TCP: Final = 3
_SIGNALS_AND_ABSTRACT_SOCKETS: Final = 3
_NO_NEW_PRIVILEGES: Final = 38
LEAST_ABI: Final = 4
"""The first that restricts TCP: Linux 6.7."""


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 without it."""
    return max(0, int(_libc().syscall(_CREATE, None, 0, _VERSION)))


def restrict_files(readable: Sequence[str], writable: str) -> None:
    """Leaves this process the readable files and folders, and one folder to write to; no TCP. Raises OSError."""
    abi, libc = landlock_abi(), _libc()
    files = next(rights for version, rights in sorted(_ALL_OF_ABI.items(), reverse=True) if version <= abi)
    attributes = struct.pack("QQQ", files, _TCP, _SIGNALS_AND_ABSTRACT_SOCKETS if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16
    ruleset = _checked(libc.syscall(_CREATE, attributes, size, 0))
    for path, rights in (*((path, _EXECUTE | _READ_FILE | _READ_FOLDER) for path in readable), (writable, files)):
        with contextlib.suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & _OF_FILES
            _checked(libc.syscall(_ADD, ruleset, 1, struct.pack("=Qi", allowed, opened), 0))
            os.close(opened)
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(libc.syscall(_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def restrict_resources(cpu_s: int, memory_bytes: int) -> None:
    """Limits processor time, memory, the size of files, and children (of another user than root)."""
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


class _Unable(Exception):
    """The task's side is wrong, not the answer: a pattern, a schema, a query, a database."""


def match(payload: Mapping[str, Any]) -> Iterator[str | None]:
    """Whether one of the patterns occurs in the text."""
    try:
        patterns = [re.compile(pattern) for pattern in payload["right"]]
    except (re.error, OverflowError, RecursionError) as error:
        raise _Unable(f"not a pattern: {error}") from error
    occurs = any(pattern.search(payload["answer"]) for pattern in patterns)
    yield None if occurs else "the pattern does not occur in the answer"


def validate(payload: Mapping[str, Any]) -> Iterator[str | None]:
    """Whether the value satisfies one of the JSON schemas."""
    differences = [_differing_from(schema, payload["answer"]) for schema in payload["right"]]
    yield None if None in differences else differences[0]


def _differing_from(schema: Any, value: Any) -> str | None:
    """Why the value does not satisfy the schema; raises _Unable if the schema is what cannot be used."""
    import referencing
    from jsonschema import exceptions, validators
    from referencing.exceptions import Unresolvable

    def first_error(of: Any) -> Any:
        return exceptions.best_match(validator(schema, registry=referencing.Registry()).iter_errors(of))

    try:
        validator = validators.validator_for(schema, default=validators.Draft202012Validator)
        validator.check_schema(schema)
        plain_values: tuple[Any, ...] = (None, 0, "", [], {})
        for plain in plain_values:
            first_error(plain)
    except exceptions.SchemaError as error:
        raise _Unable(f"not a JSON schema: {error.message}") from error
    except Exception as error:
        raise _Unable(f"the JSON schema cannot be used: {error}") from error
    try:
        first = first_error(value)
    except (re.error, Unresolvable) as error:
        raise _Unable(f"the JSON schema cannot be used: {error}") from error
    except Exception as error:  # noqa: BLE001
        return f"it cannot be compared with the schema: {type(error).__name__}: {error}"
    return None if first is None else f"{first.json_path}: {first.message}"


def query(payload: Mapping[str, Any]) -> Iterator[str | None]:
    """Whether the query has the rows of one of the right ones; their order counts if the right one has an ORDER BY."""
    rows_of = _duckdb_rows if payload["is_duckdb"] else _sqlite_rows
    wanted = []
    for right in payload["right"]:
        try:
            wanted.append((rows_of(payload["database"], right), _is_ordered(right)))
        except Exception as error:
            raise _Unable(f"the right query fails: {error}") from error
    try:
        result = rows_of(payload["database"], payload["answer"])
    except Exception as error:  # noqa: BLE001
        yield f"the query fails: {error}"
        return
    if any(_same_rows(result, rows, ordered=ordered) for rows, ordered in wanted):
        yield None
        return
    right, _ = wanted[0]
    yield f"{len(result)} rows that begin with {_first(result)}, not {len(right)} that begin with {_first(right)}"


def _sqlite_rows(database: str, text: str) -> list[tuple[Any, ...]]:
    import sqlite3

    reads = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
    connection = sqlite3.connect(f"{Path(database).as_uri()}?mode=ro", uri=True)
    connection.execute("PRAGMA temp_store = memory")
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in reads else sqlite3.SQLITE_DENY)
    cursor = connection.execute(text)
    if cursor.description is None:
        raise ValueError("it is no SELECT")
    return _bounded(cursor.fetchmany(MAX_ROWS + 1))


def _duckdb_rows(database: str, text: str) -> list[tuple[Any, ...]]:
    import duckdb

    connection = duckdb.connect(database, read_only=True, config={"threads": 1})
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    statements = connection.extract_statements(text)
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        raise ValueError("it is no single SELECT")
    return _bounded(connection.execute(statements[0]).fetchmany(MAX_ROWS + 1))


def _bounded(rows: Sequence[Any]) -> list[tuple[Any, ...]]:
    if len(rows) > MAX_ROWS:
        raise ValueError(f"it has more than {MAX_ROWS} rows")
    return [tuple(row) for row in rows]


def _is_ordered(text: str) -> bool:
    """Whether the query has an ORDER BY outside of parentheses, texts and comments."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    while (shorter := re.sub(r"\([^()]*\)", " ", plain)) != plain:
        plain = shorter
    return re.search(r"\border\s+by\b", plain, re.IGNORECASE) is not None


def _same_rows(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]], *, ordered: bool) -> bool:
    """Numbers are compared to nine digits, so 1 and 1.0 are equal; NULL equals NULL."""
    left, right = ([tuple(map(_plain, row)) for row in rows] for rows in (one, other))
    return left == right if ordered else sorted(left, key=repr) == sorted(right, key=repr)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, (str, bytes)):
        return repr(value)
    try:
        return f"{float(value):.9g}"
    except (TypeError, ValueError, OverflowError):
        return repr(value)


def _first(rows: Sequence[Any]) -> str:
    return f"{rows[0]!r:.100}" if rows else "none"


def test(payload: Mapping[str, Any]) -> Iterator[str | None]:
    """Whether the code runs, and then each of the tests, in the names that the code has defined.

    Of a test that defines functions `test_…` or cases of unittest, these run too.
    """
    names: dict[str, object] = {"__name__": "answer"}
    try:
        exec(compile(payload["answer"], "answer.py", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - also SystemExit
        yield from (_raised("the code", error) for _ in payload["right"])
        return
    for number, text in enumerate(payload["right"], 1):
        try:
            _run(text, f"test_{number}.py", dict(names))
        except BaseException as error:  # noqa: BLE001
            yield _raised(f"test {number}", error)
        else:
            yield None


def _run(text: str, file: str, names: dict[str, object]) -> None:
    """Raises what a test raises."""
    import asyncio
    import unittest

    before = dict(names)
    exec(compile(text, file, "exec"), names)
    new = {name: value for name, value in names.items() if before.get(name) is not value}
    for name, value in new.items():
        if name.startswith("test") and inspect.isfunction(value):
            if inspect.iscoroutine(awaited := value()):
                asyncio.run(awaited)
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            outcome = unittest.defaultTestLoader.loadTestsFromTestCase(value).run(unittest.TestResult())
            if failed := [*outcome.errors, *outcome.failures]:
                raise AssertionError(failed[0][1].strip().splitlines()[-1])


def _raised(what: str, error: BaseException) -> str:
    """The error may be of a class of the answer's, whose own methods raise."""
    try:
        return f"{what} raised {type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001
        return f"{what} raised an error that cannot be shown"


def grade(payload: Mapping[str, Any]) -> Iterator[float]:
    """What the function `grade(sample, item)` of a grader's source returns."""
    names: dict[str, Any] = {"__name__": "grader"}
    try:
        exec(compile(payload["source"], "grader.py", "exec"), names)
        value = names["grade"](payload["sample"], payload["item"])
        number = float(value) if isinstance(value, numbers.Real) else None
        shown = "" if number is not None else f"{value!r:.80}"
    except BaseException as error:
        raise _Unable(_raised("its code", error)) from error
    if number is None:
        raise _Unable(f"grade returned {shown}, which is no number")
    yield number


def similarity(payload: Mapping[str, Any]) -> Iterator[float]:
    """How similar two texts are, by a metric, from 0 to 1."""
    metric, text, reference = payload["metric"], payload["text"], payload["reference"]
    if metric == "fuzzy_match":
        from rapidfuzz import fuzz, utils

        # Texts without letters and digits are empty to the processor, and then never similar.
        same = text == reference
        yield 1.0 if same else fuzz.WRatio(text, reference, processor=utils.default_process) / 100
    elif metric.startswith("rouge_"):
        yield _rouge(
            metric.removeprefix("rouge_"), *(re.findall(r"[^\W_]+", each.lower()) for each in (text, reference))
        )
    else:
        yield float(_translation(metric, text, reference))


def _rouge(kind: str, words: Sequence[str], wanted: Sequence[str]) -> float:
    """The F-measure of ROUGE (Lin 2004): of groups of `kind` words, or `l` for the longest common subsequence."""
    if kind == "l":
        from rapidfuzz.distance import LCSseq

        n_common, n_given, n_wanted = LCSseq.similarity(words, wanted), len(words), len(wanted)
    else:
        given, right = (Counter(zip(*(each[i:] for i in range(int(kind))), strict=False)) for each in (words, wanted))
        n_common, n_given, n_wanted = (counts.total() for counts in (given & right, given, right))
    return 2 * n_common / (n_given + n_wanted) if n_common else 0.0


def _translation(metric: str, text: str, reference: str) -> Any:
    """The score of a metric of NLTK, whose functions do not say that they return numbers."""
    from nltk.tokenize import NLTKWordTokenizer

    words, wanted = (NLTKWordTokenizer().tokenize(each) for each in (text, reference))
    if not words or not wanted:
        return words == wanted
    if metric == "gleu":
        from nltk.translate.gleu_score import sentence_gleu

        return sentence_gleu([wanted], words)
    if metric == "meteor":
        from nltk.translate.meteor_score import meteor_score

        return meteor_score([wanted], words)
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    # A text of less than four words has no group of four.
    return sentence_bleu([wanted], words, smoothing_function=SmoothingFunction().method4, auto_reweigh=True)


KINDS: Final[dict[str, Callable[[Mapping[str, Any]], Iterator[str | None] | Iterator[float]]]] = {
    "regex": match,
    "json_schema": validate,
    "sql": query,
    "tests": test,
    "grade": grade,
    "similarity": similarity,
}


def main() -> None:
    asked = json.load(sys.stdin)
    # What the answer prints is no outcome: these go to another descriptor, and have a mark that it is not told.
    outcomes, mark = os.fdopen(os.dup(1), "w"), asked["mark"]
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)

    def tell(key: str, outcome: str | float | None) -> None:
        shown = " ".join(outcome.split())[:_MAX_OUTCOME] if isinstance(outcome, str) else outcome
        outcomes.write(json.dumps({"mark": mark, key: shown}) + "\n")
        outcomes.flush()

    try:
        try:
            restrict_resources(asked["cpu_s"], asked["memory_bytes"])
            if landlock_abi() >= LEAST_ABI:
                restrict_files(asked["readable"], os.getcwd())
        except OSError as error:
            raise _Unable(str(error)) from error
        for outcome in KINDS[asked["kind"]](asked["payload"]):
            tell("score" if isinstance(outcome, float) else "failure", outcome)
    except (_Unable, ImportError) as error:
        tell("unable", str(error))
    outcomes.close()
    os._exit(0)  # nothing that the answer has left behind runs


if __name__ == "__main__":
    main()
