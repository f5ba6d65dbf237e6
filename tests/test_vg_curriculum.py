"""The curriculum of verify-gym: what was pinned stays, held-out tasks stay out of the pools, identities find their task."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl.verify_gym import curriculum as module
from miniverl.verify_gym.answer import Task, grade, rational_text
from miniverl.verify_gym.curriculum import (
    LOCK,
    append_entry,
    check_registry,
    curriculum,
    curriculum_text,
    data_bytes,
    draw_outside,
    entry,
    family_task,
    find_task,
    heldout,
    instance,
    pool_task,
    read_curriculum,
    read_heldout,
    registry_problems,
    train,
    validation,
    write_heldout,
)
from miniverl.verify_gym.exact import VerifyGymError
from miniverl.verify_gym.families import GENERATORS, generate

PACKAGE = Path(module.__file__).parent
CHAIN = curriculum()
HELDOUT = data_bytes("heldout-v0.json")

# The lock once more, so that the file and the code can't be changed together unseen. Append; change nothing.
RELEASED = [
    ("family/xx", "60aaba8dd3a63c8dfe36d1e588a5475950d5587d04be9b8f567f3ec3dcf674c6"),
    ("family/kroot", "0ac147a1ab2aebf70139fb6401ef958cfb0b76d24a2a68c5e82cc5d48a4371a3"),
    ("family/poly", "73c7894ef18b15b62e5b2a5ec7dada2fc539a970d538cf77145426347c80ae96"),
    ("heldout/v0", "6a9462d24bdb695816ef6d385d13bba3d9851940764eb2be5566a4b3c296645c"),
    ("stage/v0", "bc47b780f75dc9864681adc5e7ed2120080aca578a0b59c1c2a823b56067bc1f"),
]
EACH = pytest.mark.parametrize("at", range(len(RELEASED)))


def refused(entries, reason):
    with pytest.raises(VerifyGymError) as caught:
        read_curriculum(curriculum_text(entries))
    assert reason in caught.value.message, caught.value.message
    assert "curriculum.json" in caught.value.hint


def rehashed(entries):
    chain = ()
    for listed in entries:
        chain = append_entry(chain, listed.name, listed.body)
    return chain


def echo(task):
    return f"<answer>{rational_text(task.low)}, {rational_text(task.high)}</answer>"


def edited(listed):
    return replace(listed, body={**listed.body, "note": "one more key"})


def test_the_lock_in_the_code_is_the_one_released():
    assert list(LOCK)[: len(RELEASED)] == RELEASED
    assert [(listed.name, listed.sha256) for listed in CHAIN][: len(LOCK)] == list(LOCK)


@EACH
def test_an_edited_entry_is_refused(at):
    refused((*CHAIN[:at], edited(CHAIN[at]), *CHAIN[at + 1 :]), f"{CHAIN[at].name} was changed")


@EACH
def test_an_entry_edited_with_its_own_digest_is_refused(at):
    changed = replace(edited(CHAIN[at]), sha256=edited(CHAIN[at]).digest)
    last = at == len(CHAIN) - 1
    reason = f"entry {at + 1} is" if last else f"{CHAIN[at + 1].name} doesn't follow on"
    refused((*CHAIN[:at], changed, *CHAIN[at + 1 :]), reason)


@EACH
def test_an_entry_edited_with_every_digest_is_refused(at):
    refused(rehashed((*CHAIN[:at], edited(CHAIN[at]), *CHAIN[at + 1 :])), f"entry {at + 1} is {CHAIN[at].name}")


@EACH
def test_a_deleted_entry_is_refused(at):
    left = (*CHAIN[:at], *CHAIN[at + 1 :])
    last = at == len(CHAIN) - 1
    refused(left, "missing" if last else "doesn't follow on")
    refused(rehashed(left), "missing" if last else f"entry {at + 1} is {CHAIN[at + 1].name}")


@pytest.mark.parametrize("at", range(len(RELEASED) - 1))
def test_a_reordered_list_is_refused(at):
    moved = (*CHAIN[:at], CHAIN[at + 1], CHAIN[at], *CHAIN[at + 2 :])
    refused(moved, "doesn't follow on")
    refused(rehashed(moved), f"entry {at + 1} is")


def test_appending_is_accepted():
    longer = append_entry(append_entry(CHAIN, "family/zeta", {"cap": 3}), "stage/v1", {"families": ["zeta"]})
    assert read_curriculum(curriculum_text(longer)) == longer
    refused((*longer[:-1], edited(longer[-1])), "stage/v1 was changed")
    refused(append_entry(CHAIN, "stage/v0", {}), "listed twice")
    refused(append_entry(CHAIN, "../stage", {}), "misnamed")


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", "[1]", '["a"]', "[" * 100_000, '[{"name":"a"}]', "[" + "9" * 5000 + "]", "\ud800"],
    ids=range(10),
)
def test_other_text_is_refused(text):
    with pytest.raises(VerifyGymError):
        read_curriculum(text)


def test_other_spellings_are_refused():
    text = curriculum_text(CHAIN)
    assert data_bytes("curriculum.json") == text.encode()
    twice = text.replace('"cap":8,', '"cap":25,"cap":8,')
    assert json.loads(twice) == json.loads(text)
    for other in (
        text + "\n",
        text.replace("\n", "\r\n"),
        text.replace(":8,", ": 8,"),
        twice,
        text.replace(":8,", ":8.0,"),
    ):
        assert other != text
        with pytest.raises(VerifyGymError):
            read_curriculum(other)


@given(st.integers(0, len(curriculum_text(CHAIN)) - 1), st.integers(0, 127))
def test_no_changed_character_is_read(at, code):
    text = curriculum_text(CHAIN)
    changed = text[:at] + chr(code) + text[at + 1 :]
    if changed != text:
        with pytest.raises(VerifyGymError):
            read_curriculum(changed)


@given(st.integers(0, len(HELDOUT) - 1), st.integers(1, 255))
def test_no_changed_byte_of_the_heldout_file_is_read(at, flip):
    changed = bytearray(HELDOUT)
    changed[at] ^= flip
    with pytest.raises(VerifyGymError, match="the curriculum lists"):
        read_heldout("v0", bytes(changed))


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b + b"\n",
        lambda b: b.replace(b"\n", b"\r\n"),
        lambda b: b[:-1],
        lambda b: b"\xef\xbb\xbf" + b,
        lambda b: b"",
    ],
    ids=["newline", "crlf", "no newline", "bom", "empty"],
)
def test_a_resaved_heldout_file_is_refused(change):
    with pytest.raises(VerifyGymError) as caught:
        read_heldout("v0", change(HELDOUT))
    assert "never edited" in caught.value.hint


def in_a_copy(tmp_path, damage):
    """What `heldout()` says in a copy of the package under another name."""
    copy = tmp_path / "copied_gym"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    damage(copy / "data")
    code = (
        "from copied_gym.curriculum import heldout, train\nfrom copied_gym.exact import VerifyGymError\n"
        "try:\n    print(len(heldout()), train(0).task_id)\nexcept VerifyGymError as error:\n    print(error.message)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def flip(path):
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: None, "120 xx/train/0"),
        (lambda data: flip(data / "heldout-v0.json"), "the curriculum lists 839ce19ff57e"),
        (lambda data: flip(data / "curriculum.json"), "curriculum"),
        (lambda data: (data / "heldout-v0.json").unlink(), "heldout-v0.json is missing"),
    ],
    ids=["nothing", "heldout", "curriculum", "deleted"],
)
def test_an_installed_copy_checks_its_own_files(tmp_path, damage, said):
    assert said in in_a_copy(tmp_path, damage)


def test_the_heldout_set_is_forty_a_family_and_no_constant_twice():
    tasks = heldout()
    assert [task.task_id for task in tasks[:4]] == [
        "xx/heldout-v0/0",
        "kroot/heldout-v0/0",
        "poly/heldout-v0/0",
        "xx/heldout-v0/1",
    ]
    assert sorted((task.family, task.index) for task in tasks) == sorted((f, i) for f in GENERATORS for i in range(40))
    assert len({instance(task) for task in tasks}) == 120
    for task in tasks:
        verdict = grade(task, echo(task))
        assert (verdict.verdict, verdict.progress) == ("CERTIFIED", 0)
        assert set(task.to_row()) == {"family", "split", "index", "params", "low", "high"}  # no answer to leak
    tasks.clear()
    assert len(heldout()) == 120


def test_the_heldout_file_is_made_the_same_again_and_never_replaced(tmp_path):
    target = tmp_path / "heldout-v0.json"
    assert write_heldout(target, "v0", ["xx", "kroot", "poly"]) == entry("heldout/v0").body["sha256"]
    assert target.read_bytes() == HELDOUT
    with pytest.raises(VerifyGymError, match="exists"):
        write_heldout(target, "v0", ["xx"], 1)
    assert target.read_bytes() == HELDOUT


def test_pools_never_hold_a_heldout_constant():
    held = {instance(task) for task in heldout()}
    moved = 0
    for split in ("train", "validation"):
        for index in range(3000):
            task = pool_task(split, 3 * index)
            assert task.family == "xx" and instance(task) not in held
            moved += task != generate("xx", split, index)
    assert moved >= 5  # the rule was needed


def test_a_taken_identity_is_redrawn_the_same_way(monkeypatch):
    first = [generate("poly", "train", index) for index in range(10)]
    taken = frozenset(instance(task) for task in first)
    again = [draw_outside("poly", "train", index, taken) for index in range(10)]
    assert not taken & {instance(task) for task in again}
    assert [task.task_id for task in again] == [task.task_id for task in first]
    assert again == [generate("poly", "train", index, 1) for index in range(10)]
    twice = taken | {instance(task) for task in again}
    assert draw_outside("poly", "train", 3, twice) == generate("poly", "train", 3, 2)
    monkeypatch.setattr(module, "_taken", lambda name: taken)
    assert [family_task("poly", "train", index) for index in range(10)] == again
    assert train(2 + 3 * 4) == again[4]


def test_a_heldout_polynomial_is_taken_whatever_its_interval():
    task = next(task for task in heldout() if task.family == "poly")
    assert instance(replace(task, low=(-99, 1), high=(99, 1), split="train", index=7)) == instance(task)


def test_an_exhausted_family_is_an_error(monkeypatch):
    everything = type(
        "Everything", (), {"__contains__": lambda self, item: True, "__len__": lambda self: 1, "__iter__": None}
    )()
    monkeypatch.setattr(module, "REDRAWS", 3)
    with pytest.raises(VerifyGymError, match="all taken"):
        draw_outside("kroot", "train", 0, everything)


def test_the_rotation_goes_through_the_families():
    assert [train(index).task_id for index in range(5)] == [
        "xx/train/0",
        "kroot/train/0",
        "poly/train/0",
        "xx/train/1",
        "kroot/train/1",
    ]
    assert validation(299).task_id == "poly/validation/99"
    assert train(6).params != validation(6).params


@pytest.mark.parametrize("call", [lambda: train(-1), lambda: pool_task("test", 0), lambda: pool_task("heldout-v0", 0)])
def test_no_such_pool(call):
    with pytest.raises(VerifyGymError):
        call()


def test_an_identity_finds_its_task():
    some = [*heldout()[::17], *map(train, range(20)), *map(validation, range(20))]
    assert [find_task(task.task_id) for task in some] == some


@pytest.mark.parametrize(
    "task_id",
    ["", "xx", "xx/train", "xx/train/-1", "xx/train/01", "xx/train/1/", "zz/train/1", "xx/test/1", "xx/heldout-v0/40"]
    + [
        "xx/heldout-v9/0",
        "xx/train/1\n",
        "xx/train/" + "9" * 5000,
        "../train/1",
        "xx/train/\u0661",
        None,
        7,
        "dummy/heldout-v0/1",
    ],
)
def test_an_identity_of_no_task_is_refused(task_id):
    with pytest.raises(VerifyGymError):
        find_task(task_id)


def test_the_registry_is_whole():
    check_registry()
    check_registry(second=["xx", "kroot", "poly"])


@pytest.mark.skipif(shutil.which("node") is None, reason="the second decider runs on Node.js, which isn't on PATH")
def test_the_second_decider_decides_every_family():
    check = PACKAGE.parent.parent / "environments" / "verify_gym" / "check.js"
    lines = [
        json.dumps({"id": task.family, "task": task.to_row(), "reply": echo(task), "truncated": False})
        for task in heldout()[:3]
    ]
    text = "\n".join(lines) + "\n"
    done = subprocess.run(["node", check], input=text, capture_output=True, text=True, check=True)
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    check_registry(second=[said["id"] for said in verdicts if said.get("verdict") == "CERTIFIED"])


@pytest.mark.parametrize(
    ("table", "reason"),
    [("GENERATORS", "generator"), ("WORDINGS", "wording"), ("FAMILIES", "side decider")],
)
def test_a_family_without_a_part_is_named(monkeypatch, table, reason):
    left = {name: part for name, part in getattr(module, table).items() if name != "poly"}
    monkeypatch.setattr(module, table, left)
    assert registry_problems() == [f"poly has no {reason}"]
    with pytest.raises(VerifyGymError, match=reason):
        check_registry()


def test_a_new_family_needs_its_parts(monkeypatch):
    monkeypatch.setattr(module, "GENERATORS", {**GENERATORS, "zeta": GENERATORS["xx"]})
    parts = ["side decider", "second decider", "wording", "curriculum entry", "ledger", "held-out set"]
    assert registry_problems(second=["xx", "kroot", "poly"]) == [f"zeta has no {part}" for part in parts]


def test_an_entry_without_its_ledger_or_heldout_set_is_named(monkeypatch):
    body = {key: value for key, value in CHAIN[0].body.items() if key not in ("ledger", "heldout")}
    monkeypatch.setattr(module, "curriculum", lambda: rehashed((replace(CHAIN[0], body=body), *CHAIN[1:])))
    assert registry_problems() == ["xx has no ledger", "xx has no held-out set"]


def test_a_changed_generator_prompt_or_limit_is_named(monkeypatch):
    shifted = lambda stream, index: GENERATORS["xx"](stream, index + 1)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setitem(generate.__globals__, "GENERATORS", {**GENERATORS, "xx": shifted})
        found = registry_problems()
        assert "family/xx: tasks_sha256 isn't as listed" in found and "stage/v0: tasks_sha256 isn't as listed" in found
        assert not [problem for problem in found if "kroot" in problem or "poly" in problem or "heldout" in problem]
    with monkeypatch.context() as patch:
        patch.setattr(module, "prompt", lambda task: "Please. " + task.family)
        assert len(registry_problems()) == 3
    with monkeypatch.context() as patch:
        limits = {**module.FAMILIES, "kroot": replace(module.FAMILIES["kroot"], size_limit=10**31)}
        patch.setattr(module, "FAMILIES", limits)
        assert registry_problems() == ["family/kroot: size_limit isn't as listed"]
    assert registry_problems() == []


def test_rows_read_back():
    for task in [*heldout(), *map(train, range(30))]:
        assert Task.from_row(json.loads(json.dumps(task.to_row()))) == task
