"""Canonical JSON, strict reading, and the commit of the right repository."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl import core
from miniverl.core import DataError, JsonLimits, MiniVerlError, canonical_json, compact_json, digest, loads_strict

RECORD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(RECORD)
def test_what_is_written_is_read_back(record):
    for text in (canonical_json(record), compact_json(record)):
        assert loads_strict(text) == record and text.encode("utf-8")
    assert "\n" not in compact_json(record) and canonical_json(record).endswith("\n")
    assert canonical_json(loads_strict(compact_json(record))) == canonical_json(record)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=6), st.integers(), max_size=6), st.randoms(use_true_random=False))
def test_digest_ignores_the_order_of_keys(record, random):
    items = list(record.items())
    random.shuffle(items)
    assert digest(dict(items)) == digest(record)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet='{}[]",:0123456789.eE+-truefalsn\\u \n', max_size=60))
def test_any_text_is_read_or_refused_and_never_more_generous_than_json(text):
    for limits in (None, JsonLimits()):
        try:
            value = loads_strict(text, limits=limits, source="here")
        except DataError as error:
            assert error.message.startswith("here: ") and error.hint
            continue
        assert json.loads(text.removeprefix("\ufeff")) == value and canonical_json(value)


@settings(max_examples=100, deadline=None)
@given(
    st.floats() | st.sampled_from([math.inf, -math.inf, math.nan]),
    st.sampled_from([lambda x: [x], lambda x: {"a": {"b": x}}, lambda x: x]),
)
def test_only_finite_numbers_are_written(number, wrap):
    if math.isfinite(number):
        assert loads_strict(compact_json(wrap(number))) == wrap(number)
    else:
        with pytest.raises(DataError, match="JSON cannot hold"):
            compact_json(wrap(number))


@pytest.mark.parametrize("depth", [32, 33])
def test_depth_is_counted_in_levels(depth):
    text = "[" * depth + "]" * depth
    if depth <= 32:
        assert loads_strict(text, limits=JsonLimits())
    else:
        with pytest.raises(DataError, match="deeper than 32"):
            loads_strict(text, limits=JsonLimits())


def test_members_are_bounded_in_objects_and_arrays():
    for build in (lambda n: list(range(n)), lambda n: {f"k{i}": 0 for i in range(n)}):
        assert loads_strict(compact_json(build(256)), limits=JsonLimits())
        with pytest.raises(DataError, match="257 members"):
            loads_strict(compact_json(build(257)), limits=JsonLimits())


def test_every_error_keeps_message_and_hint_across_processes():
    family = [cls for cls in vars(core).values() if isinstance(cls, type) and issubclass(cls, MiniVerlError)]
    assert len(family) >= 13
    for cls in family:
        error = pickle.loads(pickle.dumps(cls("what", hint="do")))
        assert (
            type(error) is cls
            and error.render() == "error: what\nhint: do"
            and cls.exit_code == (2 if cls is core.UsageError else 1)
        )


def test_a_broken_package_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("import no_such_thing_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        core.MissingDependencyError, match="halfway cannot be imported: No module named 'no_such_thing_at_all'"
    ):
        core.require("halfway", "train")


def git(folder: Path, *words: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit_seen_from(package_home: Path, start: Path, **extra: str) -> str:
    """What `git_commit(start)` says in a process that imports miniverl from `package_home`."""
    code = f"import sys; from pathlib import Path; from miniverl.core import git_commit; sys.stdout.write(str(git_commit(Path({str(start)!r}))))"
    env = {**os.environ, "PYTHONPATH": str(package_home), **extra}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=package_home, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_is_that_of_our_own_checkout_or_none(tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for home in (ours, other / ".venv" / "lib"):
        (home / "miniverl").mkdir(parents=True)
        (home / "miniverl" / "__init__.py").write_text("")
        shutil.copy(core.__file__, home / "miniverl" / "core.py")
    for place, committed in ((ours, "miniverl"), (other, ".")):
        git(place, "init", "-q")
        assert commit_seen_from(ours, place) == "None", "nothing is committed yet"
        git(place, "add", "-f", committed)
        git(place, "commit", "-q", "-m", "all")
    head = git(ours, "rev-parse", "HEAD")
    assert commit_seen_from(ours, ours) == commit_seen_from(ours, ours / "miniverl" / "core.py") == head
    assert commit_seen_from(ours, other) == "None", "a run in a foreign repository"
    assert commit_seen_from(other / ".venv" / "lib", other) == "None", (
        "installed inside a foreign repository, even committed there"
    )
    assert commit_seen_from(ours, ours, GIT_DIR=str(other / ".git")) == head
    git(ours, "rm", "-q", "--cached", "miniverl/core.py")
    git(ours, "commit", "-q", "-m", "forget")
    assert commit_seen_from(ours, ours) == "None", "sources that are not tracked have no commit"
