"""Benchmark results: arbitrary records survive, foreign keys and NaN do not, published files keep every value."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miniverl.core import DataError, canonical_json, sha256_file
from miniverl.evaluation import schema
from miniverl.evaluation.schema import (
    TIME_FIELDS,
    V1_NAMES,
    V2_NEEDS,
    ArmResult,
    BenchmarkResult,
    schema_text,
    without_times,
)

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmarks" / "results" / "published"
SHA256 = {
    "cpu-toy-calc-matched.json": "99d07afa813363f795054122c2ae9e026b793f7fbb69a9a78f2f6059f97e9a5b",
    "gpu-calc-hard-equal-update-v2.json": "53fc1d4d5b7adee09618d77ad62d4086ba56b78569832d6fc7c3bcd5c2695bbc",
    "rtx4080-calc-hard-matched.json": "edb544324fcd6bf9e9eb0e8b97196ff2093ed29619a0d0c6ddcb56004d06c591",
}


def source(name: str) -> dict:
    return json.loads((PUBLISHED / name).read_text(encoding="utf-8"))


def leaves(value: Any, path: tuple = ()):
    """Every value that is no container, or an empty one, with the keys that lead to it."""
    inner = (
        list(value.items() if isinstance(value, dict) else enumerate(value)) if isinstance(value, (dict, list)) else []
    )
    if not inner:
        yield path, value
    for key, item in inner:
        yield from leaves(item, (*path, key))


def renamed(path: tuple) -> tuple:
    """Where a value of an older file stands in the loaded record."""
    return tuple(V1_NAMES.get(part, part) if len(path) == 3 and path[0] == "arms" else part for part in path)


# -- published files


def test_published_files_are_the_ones_that_were_published():
    assert {path.name: sha256_file(path) for path in sorted(PUBLISHED.glob("*.json"))} == SHA256


@pytest.mark.parametrize("name", SHA256)
def test_no_value_of_a_published_file_is_lost_and_none_is_invented(name):
    raw, result = source(name), BenchmarkResult.read(PUBLISHED / name)
    loaded = dict(leaves(json.loads(result.to_json())))
    expected = {renamed(path): value for path, value in leaves(raw)}
    assert len(expected) == len(list(leaves(raw))) > 200
    for path, value in expected.items():
        assert loaded[path] == value and isinstance(loaded[path], bool) == isinstance(value, bool), path
    invented = {path: value for path, value in loaded.items() if path not in expected and value is not None}
    assert invented == {}
    assert BenchmarkResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("name", SHA256)
def test_aggregate_of_a_published_file_follows_from_its_rows(name):
    raw = source(name)["arms"]
    rows = BenchmarkResult.read(PUBLISHED / name).aggregate()
    assert [row["name"] for row in rows] == list(dict.fromkeys(arm["name"] for arm in raw))
    for row in rows:
        rates = [arm["success_rate"] for arm in raw if arm["name"] == row["name"]]
        assert row["success_rate_mean"] == pytest.approx(sum(rates) / len(rates), abs=1e-12)
        assert (row["success_rate_min"], row["success_rate_max"], row["seeds"]) == (min(rates), max(rates), len(rates))
        assert row["single_seed"] == (len(rates) == 1) and not {"p_value", "confidence"} & set(row)


def test_the_json_schema_accepts_what_is_written_and_the_published_format_2():
    validator = jsonschema.Draft202012Validator(json.loads(schema_text()))
    for name in SHA256:
        validator.validate(json.loads(BenchmarkResult.read(PUBLISHED / name).to_json()))
    raw = source("gpu-calc-hard-equal-update-v2.json")
    validator.validate(raw)
    for name in V2_NEEDS:
        assert not validator.is_valid({key: value for key, value in raw.items() if key != name})
        assert not validator.is_valid(raw | {name: None})
        with pytest.raises(DataError, match=name):
            BenchmarkResult.parse(raw | {name: None})


def test_committed_schema_is_the_generated_one():
    committed = ROOT / "benchmarks" / "schema" / "benchmark-result.schema.json"
    assert committed.read_bytes() == schema_text().encode(), "write it again: miniverl schema --out " + committed.name


# -- refusals


def places(value: Any, path: tuple = ()):
    """Every mapping with fixed keys inside a result."""
    free = {"hardware", "software", "controlled", "teacher_adapter", "measurement_status", "termination_reasons"}
    free |= {
        "failure_categories",
        "resolved_config",
        "common_resolved_config",
        "common_declared_config",
        "arm",
        "common",
    }
    if path and path[-1] in free:
        return
    if isinstance(value, dict):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def with_change(value: dict, path: tuple, key: str, new: Any) -> dict:
    changed = copy.deepcopy(value)
    inner = changed
    for part in path:
        inner = inner[part]
    inner[key] = new
    return changed


def example() -> dict:
    """Format 2 with at least one of every kind of row."""
    raw = source("gpu-calc-hard-equal-update-v2.json")
    fit = {"digest": "0" * 64, "fit_seconds": 1.5, "final_loss": 0.1}
    return raw | {"arms": raw["arms"][:2], "teacher_preparation": [fit]}


def test_unknown_keys_are_refused_at_every_level():
    raw = example()
    found = list(places(raw))
    levels = {tuple("*" if isinstance(part, int) else part for part in path) for path in found}
    row = ("arms", "*", "structured_diff", "*")
    assert levels == {
        (),
        ("arms", "*"),
        row,
        ("cold_start",),
        ("cold_start", "checkpoints", "*"),
        ("teacher_preparation", "*"),
    }
    for path in found:
        with pytest.raises(DataError, match="surprise"):
            BenchmarkResult.parse(with_change(raw, path, "surprise", 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_refused_everywhere(bad):
    raw = example()
    for path, value in leaves(raw):
        if isinstance(value, float) or path[:1] in (("hardware",), ("controlled",)):
            *above, key = path
            with pytest.raises(DataError):
                BenchmarkResult.parse(with_change(raw, tuple(above), key, bad))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"a": 1, "a": 1}', '{"schema_version": 3}', '{"schema_version": "2"}']
)
def test_text_that_is_no_result_is_a_data_error_with_its_source(text):
    with pytest.raises(DataError) as error:
        BenchmarkResult.from_json(text, "x.json")
    assert "x.json" in error.value.message and error.value.hint


def test_a_record_does_not_follow_its_source():
    raw = example()
    result = BenchmarkResult.parse(raw)
    before = result.to_json()
    raw["controlled"]["allowed_differences"].append("later")
    raw["arms"][0]["structured_diff"].clear()
    assert result.to_json() == before
    with pytest.raises(ValueError, match="frozen"):
        result.name = "other"


def test_times_are_exactly_what_without_times_removes():
    raw = example()
    kept = dict(leaves(without_times(raw)))
    gone = {path[-1] for path, _ in leaves(raw) if path not in kept}
    assert gone == {"created_at", "train_seconds", "evaluation_seconds", "wall_seconds", "fit_seconds"}
    assert raw == example(), "the argument is left alone"
    assert not {part for path in kept for part in path} & TIME_FIELDS


def test_no_torch_is_needed():
    code = "import sys; from miniverl.evaluation.schema import schema_text; schema_text(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# -- arbitrary results

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBER = st.integers(0, 2**63) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)
SPECIAL = {
    schema.Json: JSON,
    schema.JsonMapping: st.dictionaries(TEXT, JSON, max_size=2),
    schema.Sha256: st.integers(0, 2**256 - 1).map(lambda n: f"{n:064x}"),
    schema.Rate: st.floats(0, 1),
    schema.Amount: st.floats(0, allow_nan=False, allow_infinity=False),
    schema.Count: st.integers(0, 2**70),
    int: st.integers(),
    str: TEXT.filter(bool),
    float: st.floats(allow_nan=False, allow_infinity=False),
}


def any_of(annotation: Any) -> st.SearchStrategy:
    """Arbitrary values of a field's type."""
    if annotation in SPECIAL:
        return SPECIAL[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, type(None)):
        return st.none()
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(any_of, inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is Annotated:  # a described Sha256 is a flat Annotated[str, pattern, description]
        known = Annotated[inner[0], inner[1]]
        return SPECIAL[known] if known in SPECIAL else any_of(inner[0])
    if origin is NotRequired:
        return any_of(inner[0])
    if origin is list:
        return st.lists(any_of(inner[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(TEXT, any_of(inner[1]), max_size=2)
    hints = typing.get_type_hints(annotation, include_extras=True)
    needed = {name: any_of(hint) for name, hint in hints.items() if typing.get_origin(hint) is not NotRequired}
    rest = {name: any_of(hint) for name, hint in hints.items() if typing.get_origin(hint) is NotRequired}
    return st.fixed_dictionaries(needed, optional=rest)


def fields_of(model: type) -> dict[str, st.SearchStrategy]:
    hints = {}
    for part in reversed(model.__mro__):
        hints.update({k: v for k, v in part.__dict__.get("__annotations__", {}).items() if k in model.model_fields})
    return {name: any_of(eval(hint, vars(schema)) if isinstance(hint, str) else hint) for name, hint in hints.items()}


ARM_FIELDS, RESULT_FIELDS = fields_of(ArmResult), fields_of(BenchmarkResult)


ALIASES = schema._ARM_ALIASES + schema._RESULT_ALIASES


def some_of(draw, fields: dict[str, st.SearchStrategy]) -> dict:
    """Arbitrary values for a few fields; aliases follow the field whose name they repeat."""
    follow = dict(pair[::-1] for pair in ALIASES)
    names = draw(st.sets(st.sampled_from(sorted(set(fields) - set(follow) - {"arms", "seeds", "seed"})), max_size=12))
    chosen = {name: draw(fields[name]) for name in sorted(names)}
    return chosen | {alias: chosen[name] for alias, name in follow.items() if name in chosen}


@st.composite
def results(draw) -> dict:
    """An admissible result as plain data: a published one with a few arbitrary values."""
    raw = source("gpu-calc-hard-equal-update-v2.json")
    fixed = {"schema_version": 2, "created_at": raw["created_at"]}
    arms = [raw["arms"][i] | some_of(draw, ARM_FIELDS) for i in range(draw(st.integers(1, 2)))]
    arms = [arm | {"name": f"arm{i}", "seed": draw(ARM_FIELDS["seed"]), "run_dir": "run"} for i, arm in enumerate(arms)]
    other = {
        name: value for name, value in some_of(draw, RESULT_FIELDS).items() if name not in V2_NEEDS or value is not None
    }
    common = {"common_declared_config": raw["common_resolved_config"], "common_declared_config_digest": "ab" * 32}
    common |= {name: other[name] for name in common if other.get(name) is not None}
    fixed |= common | {alias: common[name] for name, alias in schema._RESULT_ALIASES}
    return raw | other | fixed | {"arms": arms, "seeds": sorted({arm["seed"] for arm in arms})}


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@given(results())
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
def test_any_result_survives_writing_and_reading(raw):
    result = BenchmarkResult.parse(raw)
    text = result.to_json()
    again = BenchmarkResult.from_json(text)
    assert again == result and again.to_json() == text
    written = dict(leaves(json.loads(text)))
    assert all(written[path] == value for path, value in leaves(json.loads(canonical_json(raw)))), "nothing is lost"
    for row in result.aggregate():
        assert row["success_rate_min"] <= row["success_rate_mean"] <= row["success_rate_max"]
