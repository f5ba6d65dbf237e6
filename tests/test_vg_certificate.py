"""A certificate holds for every answer of a pool, says what the grader said, and for nothing else."""

from __future__ import annotations

import ast
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from miniverl.verify_gym import certificate as chapter
from miniverl.verify_gym.answer import FAMILIES, Task, grade, rational_text, side_of
from miniverl.verify_gym.certificate import FIELDS, CertificateError, check_certificate, explain
from miniverl.verify_gym.curriculum import family_task
from miniverl.verify_gym.exact import RowError, VerifyGymError, lowest


def task(family, low, high, **params):
    return Task(family, "t", 0, params, lowest(*low), lowest(*high))


def answer(*ends):
    return "<answer>" + ", ".join(end if isinstance(end, str) else rational_text(end) for end in ends) + "</answer>"


def tight(row):
    """The best fractions within the size limit on both sides of the constant: mediants."""
    limit, side = FAMILIES[row.family].size_limit, side_of(row)
    (a, b), (c, d) = row.low, row.high
    while max(abs(a + c), b + d) <= limit:
        if side(lowest(a + c, b + d), False) == 1:
            a, b = a + c, b + d
        else:
            c, d = a + c, b + d
    return lowest(a, b), lowest(c, d)


def past(end, step):
    """One unit of its own denominator further."""
    return lowest(end[0] + step, end[1])


def replies(row):
    lo, hi = tight(row)
    yield answer(row.low, row.high)
    yield answer(lo, hi)
    yield answer(past(lo, 1), past(row.high, 1))
    yield answer(past(row.low, -1), past(hi, -1))
    yield answer((-7, 1), hi)
    yield answer(lo, past(row.high, 2))
    yield answer((-7, 1), (-6, 1))


ROWS = [family_task(family, "train", index) for family in FAMILIES for index in range(5)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.task_id)
def test_every_answer_has_a_certificate_that_holds(row):
    words = set()
    for reply in replies(row):
        found, made = grade(row, reply), explain(row, reply)
        check_certificate(row.to_row(), json.loads(json.dumps(made)))
        assert tuple(made) == FIELDS
        assert (found.verdict, found.decimals, found.progress) == (made["verdict"], made["decimals"], made["progress"])
        assert (found.lo_word, found.hi_word) == tuple(made["claims"][name]["word"] for name in ("lo", "hi"))
        words |= {found.lo_word, found.hi_word}
    assert words == {"CERTIFIED", "REFUTED", "REFUSED"}


def leaves(value, path=()):
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path, value


def put(made, path, leaf):
    copy = json.loads(json.dumps(made))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = leaf
    return copy


WORDS = ["CERTIFIED", "REFUTED", "REFUSED", "MALFORMED"]


def changes(leaf):
    if isinstance(leaf, str) and leaf.isalpha():
        return [word for word in [*WORDS, *FAMILIES, ""] if word != leaf]
    if isinstance(leaf, str):
        number = leaf.partition("/")[0]
        return [leaf.replace(number, str(int(number) + step), 1) for step in (1, -1)] + [
            "-" + leaf,
            "0" + leaf,
            leaf + "0",
        ]
    return [[], "", 0, "0"] if leaf is None else [leaf + 1, leaf - 1, leaf + 64, float(leaf), str(leaf), None]


@pytest.mark.parametrize("row", [ROWS[0], ROWS[5], ROWS[10]], ids=lambda row: row.family)
def test_every_flip_of_every_field_is_noticed(row):
    held = []
    for reply in replies(row):
        made = explain(row, reply)
        for path, leaf in leaves(made):
            for other in changes(leaf):
                try:
                    check_certificate(row.to_row(), put(made, path, other))
                except CertificateError:
                    continue
                held.append((reply, path, leaf, other))
    assert not held


def test_keys_lists_and_whole_parts_are_not_free_either():
    row = ROWS[0]
    made = explain(row, answer(*tight(row)))
    claim = made["claims"]["lo"]
    worse = [{key: value for key, value in made.items() if key != gone} for gone in made] + [{**made, "note": 1}]
    worse += [{**made, "claims": {"lo": claim, "hi": claim}}, {**made, "claims": {**made["claims"], "x": claim}}]
    for steps in (claim["evidence"][0][:-1], [*claim["evidence"][0], ["1", 0]], claim["evidence"][1]):
        worse.append(put(made, ("claims", "lo", "evidence"), [steps, claim["evidence"][1]]))
    worse.append(put(made, ("claims", "lo", "note"), 1))
    for changed in worse:
        with pytest.raises(CertificateError):
            check_certificate(row.to_row(), changed)
    for other in ROWS[1:]:
        with pytest.raises(CertificateError):
            check_certificate(other.to_row(), made)


JUNK = [
    None,
    True,
    -1,
    10**30,
    1e300,
    float("nan"),
    "",
    "x",
    "1/0",
    "9" * 5000,
    [],
    [[]],
    {},
    {"word": "CERTIFIED"},
    "٣",
]


def test_junk_is_refused_and_never_another_error():
    rng = random.Random(3)
    for row in (ROWS[0], ROWS[5], ROWS[10]):
        for reply in (answer(*tight(row)), answer((-7, 1), row.high)):
            made = explain(row, reply)
            places = [path[:cut] for path, _ in leaves(made) for cut in range(1, len(path) + 1)]
            for path in rng.sample(places, min(len(places), 40)):
                for junk in JUNK[1:] if path == ("isolation",) else JUNK:
                    with pytest.raises(CertificateError):
                        check_certificate(row.to_row(), put(made, path, junk))
    for junk in JUNK:
        with pytest.raises(CertificateError):
            check_certificate(ROWS[0].to_row(), junk)


def test_a_chain_must_round_as_it_says():
    """An upper bound rounded down, or a looser mantissa, would be a proof of something else."""
    row = task("xx", (2, 1), (3, 1), n=5)
    made = explain(row, answer("2.1", "2.2"))
    for name, which in (("lo", 0), ("lo", 1), ("hi", 0), ("hi", 1)):
        steps = made["claims"][name]["evidence"][which]
        for at in range(len(steps)):
            for step in (1, -1):
                path = ("claims", name, "evidence", which, at, 0)
                with pytest.raises(CertificateError, match="step"):
                    check_certificate(row.to_row(), put(made, path, str(int(steps[at][0]) + step)))


@pytest.mark.parametrize(
    ("row", "reply", "words"),
    [
        (task("xx", (1, 1), (3, 1), n=4), answer("2", "3"), "REFUTED CERTIFIED"),
        (task("xx", (1, 1), (3, 1), n=4), answer("1", "2"), "CERTIFIED REFUTED"),
        (task("xx", (1, 1), (3, 1), n=4), answer("1/2", "99999/100000"), "REFUSED REFUSED"),
        (task("xx", (1, 1), (3, 1), n=4), answer("1", "100000"), "CERTIFIED CERTIFIED"),
        (task("xx", (1, 1), (3, 1), n=10**12), answer("10", "100000/3"), "CERTIFIED CERTIFIED"),
        (task("kroot", (2, 1), (4, 1), n=27, k=3), answer("3", "4"), "REFUTED CERTIFIED"),
        (task("kroot", (2, 1), (4, 1), n=27, k=3), answer("0", "3"), "REFUSED REFUTED"),
        (task("poly", (0, 1), (1, 1), coefficients=(-5, 9, 2)), answer("1/2", "1"), "REFUTED CERTIFIED"),
        (task("poly", (0, 1), (1, 1), coefficients=(5, -9, -2)), answer("0", "1/2"), "CERTIFIED REFUTED"),
        (task("poly", (0, 1), (1, 1), coefficients=(-5, 9, 2)), answer("-1/9", "10/9"), "REFUSED REFUSED"),
    ],
)
def test_bars_on_the_root_and_far_from_it(row, reply, words):
    made = explain(row, reply)
    assert " ".join(claim["word"] for claim in made["claims"].values()) == words
    check_certificate(row.to_row(), made)


def test_the_checker_handles_short_numbers_only():
    row = task("xx", (7, 1), (8, 1), n=10**6)
    for reply in (answer(*tight(row)), answer("100000/99999", "99999/99998")):
        made = explain(row, reply)
        numbers = [leaf for _, leaf in leaves(made["claims"]) if isinstance(leaf, str) and leaf.isdigit()]
        assert max(map(len, numbers)) <= 40
        assert len(json.dumps(made)) < 3000


def test_no_chain_may_drop_all_of_a_number():
    """Dropping more bits than there are makes the bound 1 * 2**s for any s, and a shift of any length."""
    row = task("xx", (2, 1), (3, 1), n=5)
    made = explain(row, answer("2.1", "2.2"))
    for name, which in (("lo", 0), ("lo", 1), ("hi", 0), ("hi", 1)):
        for dropped in (10**4, 10**12, 10**30):
            for mantissa in ("0", "1"):
                hostile = put(made, ("claims", name, "evidence", which, -1), [mantissa, dropped])
                with pytest.raises(CertificateError, match="step"):
                    check_certificate(row.to_row(), hostile)


@pytest.mark.parametrize("row", ROWS[::2], ids=lambda row: row.task_id)
def test_what_is_read_is_what_was_printed(row):
    for reply in replies(row):
        made = explain(row, reply)
        assert json.dumps(chapter._printed(row, chapter._read(row, made))) == json.dumps(made)


@pytest.mark.parametrize("row", [ROWS[0], ROWS[5], ROWS[10]], ids=lambda row: row.family)
def test_the_arithmetic_alone_finds_a_wrong_number_or_word(row):
    """Without the form: every change of a well-formed proof is found by multiplying and comparing."""
    for reply in replies(row):
        proof = chapter._read(row, explain(row, reply))
        chapter._follow(row, proof)
        other = {"CERTIFIED": "REFUTED", "REFUTED": "CERTIFIED", "REFUSED": "CERTIFIED"}
        wrong = [replace(proof, words=(other[proof.words[0]], proof.words[1]))]
        wrong += [replace(proof, words=(proof.words[0], other[proof.words[1]]))]
        wrong += [replace(proof, **{name: getattr(proof, name) + 1}) for name in ("stated", "decimals", "progress")]
        wrong += [replace(proof, verdict=other[proof.verdict])]
        wrong += [replace(proof, transform=[1, *proof.transform[1:]])] if row.family == "poly" else []
        for changed in wrong:
            with pytest.raises((CertificateError, ValueError)):
                chapter._follow(row, changed)


def test_the_two_halves_are_apart():
    """The arithmetic knows no JSON and no text, and is short enough to be written again by a stranger."""
    tree = ast.parse(Path(chapter.__file__).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    arithmetic = ["_value", "_isolated", "_ladder", "_rounded", "_climb", "_less"]
    arithmetic += ["_outside", "_bounds", "_claim", "_has_decimals", "_follow"]
    used = {node.id for name in arithmetic for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
    assert not used & {"json", "lowest", "_read", "_printed", "_text"}
    assert used & set(functions) <= {*arithmetic, "_need"}
    bodies = [node for name in arithmetic for node in ast.walk(functions[name]) if isinstance(node, ast.stmt)]
    assert len(bodies) - 2 * len(arithmetic) < 45


def test_the_checker_imports_no_decider():
    names = vars(chapter)
    assert not {"cmp_xx", "cmp_kroot", "cmp_poly", "sign_at", "side_of", "isolate"} & set(names)


def test_what_has_no_numbers_has_no_certificate():
    row = ROWS[0]
    for made in (explain(row, "none"), explain(row, answer(*tight(row)), truncated=True)):
        assert made["verdict"] == "MALFORMED" and made["progress"] == 0 and made["reason"]
        with pytest.raises(CertificateError, match="unreadable"):
            check_certificate(row.to_row(), made)


def test_rows_outside_the_argument_are_refused():
    good = task("kroot", (1, 1), (2, 1), n=2, k=2)
    made = explain(good, answer("1.4", "1.5"))
    for params in (
        {"n": "2", "k": "101"},
        {"n": "2", "k": "1" + "0" * 300},
        {"n": "-2", "k": "2"},
        {"n": "2", "k": "-2"},
    ):
        with pytest.raises(CertificateError):
            check_certificate({**good.to_row(), "params": params}, made)
    with pytest.raises(RowError):
        check_certificate({**good.to_row(), "low": "2/2"}, made)
    with pytest.raises(RowError):
        explain(task("poly", (0, 1), (6, 1), coefficients=(-119, 184, -72, 8)), answer("0.9", "1"))
    long_ends = task("poly", (-(10**390), 1), (1, 1), coefficients=(-1, *[0] * 12, 2))
    with pytest.raises(VerifyGymError):
        explain(long_ends, answer("0", "1"))
