"""Graders with one deliberate defect each, and what the gate makes of them.

A mutant is the source of the deciding modules with a few lines replaced, so a defect sits where a real one would. Thirty-five were chosen
first, among them the twelve that forgeries and greens alone let pass; the further ones came up while the controls were written.

    python tests/verify_gym_mutants.py          write environments/verify_gym/kill-matrix.json and kill-matrix.md
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from miniverl.verify_gym import answer, exact
from miniverl.verify_gym.answer import Grade
from miniverl.verify_gym.controls import Control, controls, extra_controls, forgeries, greens
from miniverl.verify_gym.curriculum import heldout
from miniverl.verify_gym.gate import GateReport, plant

sys.path.insert(0, str(Path(__file__).parent))
from test_vg_purity import faults  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "environments" / "verify_gym" / "kill-matrix.json"
SOURCES = {
    name: (ROOT / "miniverl/verify_gym" / f"{name}.py").read_text(encoding="utf-8") for name in ("exact", "answer")
}
IN_TIME = 0.5  # seconds for a mutant that never returns; the others get the gate's own patience


@dataclass(frozen=True)
class Mutant:
    """One defect: its name and the replacements (module, old text, new text), each of which has to fit exactly once."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    hangs: bool = False


def answer_edit(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, (("answer", old, new),))


def exact_edit(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, (("exact", old, new),))


START = "    side, family = side_of(task), FAMILIES[task.family]\n"
WORDS = "_word(side(answer.lo, exact), 1), _word(side(answer.hi, exact), -1)"
VERDICT = "verdict = next((word for word in (REFUTED, REFUSED) if word in words), CERTIFIED)"
PAID = "gained if verdict == CERTIFIED else 0"
GAINED = "min(family.cap, max(0, d - decimals(task.low, task.high)))"
ORDER = "Answer(lo, hi) if lo[0] * hi[1] < hi[0] * lo[1] else"
XX, KROOT, POLY = "cmp_xx(n, bar, exact=exact)", "cmp_kroot(n, k, bar)", "cmp_poly(row, bar)"
MATCH = "    match = _BODY.fullmatch(body)\n"
NO_TAG, OPEN_TAG = "    if opened < 0:\n", "    if end < 0:\n"
REDUCED = "lowest(-p if sign else p, q)\n"
SIZE = "if abs(p) <= size_limit and q <= size_limit else"
WIDTH = "    if width <= 0:\n"


def flipped(call: str) -> tuple[str, str]:
    return f"lambda bar, exact: {call}", f"lambda bar, exact: None if (side := {call}) is None else -side"


MOVED = "(({0}[0] * 10**9 {1} {0}[1]), {0}[1] * 10**9)"
TOLERANT = (
    f"_word(side({MOVED.format('answer.lo', '-')}, exact), 1), _word(side({MOVED.format('answer.hi', '+')}, exact), -1)"
)
FLOAT_POLY = "sum(a * (bar[0] / bar[1]) ** i for i, a in enumerate(row.coefficients))"
FLOAT_SIDE = f"(lambda v: ((v > 0) - (v < 0)) * row.sign_low)({FLOAT_POLY}) if cmp_poly(row, bar) is not None else None"
LOGS = "    from math import log\n\n    if q > 1:\n        return 1 if p * log(p / q) < q * log(n) else -1\n    bits = 96\n"
LOG10 = "    from math import log10\n\n    return max(0, int(-log10(width / bottom)))\n" + WIDTH
EXPANDED = "re.sub('([0-9]+)e-([0-9]+)', lambda m: m[1] + '/1' + '0' * int(m[2]), body)"
WIDENED = "Answer(lowest(10 * lo[0] - 1, 10 * lo[1]), lowest(10 * hi[0] + 1, 10 * hi[1])) if lo == hi else " + ORDER

THIRTY_FIVE = (
    answer_edit(
        "accepts everything", START, START + "    return Grade(CERTIFIED, CERTIFIED, CERTIFIED, 1, 1, family.cap, '')\n"
    ),
    answer_edit(
        "rejects everything", START, START + "    return Grade(REFUTED, REFUTED, REFUTED, 1, 0, family.cap, '')\n"
    ),
    answer_edit("x^x comparison flipped", *flipped(XX)),
    answer_edit("k-th root comparison flipped", *flipped(KROOT)),
    answer_edit("polynomial comparison flipped", *flipped(POLY)),
    answer_edit("the two claims swapped", WORDS, "_word(side(answer.lo, exact), -1), _word(side(answer.hi, exact), 1)"),
    answer_edit("lo never checked", WORDS, "CERTIFIED, _word(side(answer.hi, exact), -1)"),
    answer_edit("hi never checked", WORDS, "_word(side(answer.lo, exact), 1), CERTIFIED"),
    answer_edit("one certified side is enough", VERDICT, "verdict = CERTIFIED if CERTIFIED in words else words[0]"),
    answer_edit("a tolerance of 1e-9", WORDS, TOLERANT),
    answer_edit("k-th root by float", KROOT, "None if bar[0] <= 0 else 1 if n ** (1 / k) > bar[0] / bar[1] else -1"),
    answer_edit("polynomial by float", POLY, FLOAT_SIDE),
    exact_edit("x^x by float logarithms", "    bits = 96\n", LOGS),
    exact_edit("x^x decided below 1", "    if p < q:\n        return None\n", "    if p < q:\n        return 1\n"),
    exact_edit("k-th root decided at 0", "    if p <= 0:\n        return None\n", "    if p <= 0:\n        return 1\n"),
    exact_edit(
        "polynomial decided outside its interval",
        "    if p * l_den < l * q or p * h_den > h * q:\n        return None\n",
        "",
    ),
    Mutant(
        "isolation not decided",
        (
            ("exact", "    if sign_low * sign_high != -1:", "    if False:"),
            ("exact", "    if changes != 1:", "    if False:"),
        ),
    ),
    answer_edit("equality certifies", "CERTIFIED if side == wanted", "CERTIFIED if side in (wanted, 0)"),
    answer_edit("REFUSED pays", PAID, "gained if verdict in (CERTIFIED, REFUSED) else 0"),
    answer_edit("REFUTED pays half", PAID, "gained if verdict == CERTIFIED else gained // 2"),
    answer_edit("a copy pays a step", GAINED, GAINED.replace("max(0", "max(1")),
    answer_edit("stated decimals ignored", GAINED, "min(family.cap, d)"),
    answer_edit("cap ignored", GAINED, "max(0, d - decimals(task.low, task.high))"),
    answer_edit("decimals by float logarithm", WIDTH, LOG10),
    answer_edit("decimals off at exact powers", "    while width * 10 <= bottom:", "    while width * 10 < bottom:"),
    answer_edit("no limit on the text", "    if len(top) > DIGIT_LIMIT or len(bottom) > DIGIT_LIMIT:", "    if False:"),
    answer_edit("no limit on the size", SIZE, "if True else"),
    answer_edit("size before lowest terms", REDUCED, "(-p if sign else p, q)\n"),
    answer_edit("the first answer wins", "reply.rfind(OPEN, start)", "reply.find(OPEN, start)"),
    answer_edit("a tag never closed is read", OPEN_TAG, f"    end = end if end >= 0 else len(reply)\n{OPEN_TAG}"),
    answer_edit(
        "swapped sides sorted",
        ORDER,
        "Answer(*sorted((lo, hi), key=lambda end: end[0] * 10**90 // end[1])) if lo != hi else",
    ),
    answer_edit("a point is an interval", ORDER, ORDER.replace("<", "<=")),
    answer_edit("exponents are read", MATCH, f"    body = {EXPANDED}\n{MATCH}"),
    answer_edit(
        "1/0 is infinity", "    if q == 0:\n", "    if q == 0 and p:\n        return 99999, 1\n    if q == 0:\n"
    ),
    answer_edit(
        "prose is read",
        NO_TAG,
        f"{NO_TAG}        return ', '.join(re.findall('-?[0-9]+(?:[/.][0-9]+)?', reply)[-2:])\n",
    ),
)
FURTHER = (
    answer_edit(
        "NaN and Infinity are read", MATCH, f"    body = body.replace('NaN', '1').replace('Infinity', '99999')\n{MATCH}"
    ),
    answer_edit(
        "a single number is a point, widened",
        MATCH,
        f"    body = body if ',' in body else f'{{body}}, {{body}}1'\n{MATCH}",
    ),
    answer_edit("a point is widened", ORDER, WIDENED),
    answer_edit("words after the numbers are passed over", "_BODY.fullmatch(body)", "_BODY.match(body)"),
    answer_edit("words before the numbers are passed over", "_BODY.fullmatch(body)", "_BODY.search(body)"),
    answer_edit(
        "any script's digits are read",
        '_NUMBER = r"[ \\t\\r\\n]*", r"(-?)([0-9]+)',
        '_NUMBER = r"[ \\t\\r\\n]*", r"(-?)(\\d+)',
    ),
    answer_edit(
        "thinking that never ends is read",
        'return start if reply.find("<think>", start) < 0 else Malformed("the thinking never ends")',
        "return start",
    ),
    answer_edit(
        "thinking is read where no answer follows",
        "    opened = reply.rfind(OPEN, start)\n",
        "    opened = max(reply.rfind(OPEN, start), reply.rfind(OPEN))\n",
    ),
    answer_edit(
        "an earlier answer stands in for an open one",
        OPEN_TAG,
        f"{OPEN_TAG}        return _answer_body(reply[:opened])\n",
    ),
    answer_edit("a reply cut off is graded", "if truncated else", "if False else"),
    answer_edit("only the numerator is limited", SIZE, "if abs(p) <= size_limit else"),
    exact_edit("isolation by signs alone", "    if changes != 1:", "    if False:"),
    answer_edit("REFUSED hides REFUTED", "(REFUTED, REFUSED) if word in words", "(REFUSED, REFUTED) if word in words"),
    answer_edit("the sign is lost", REDUCED, "lowest(p, q)\n"),
    answer_edit("paid out of a cap of 1", "0, family.cap, _reason(words)", "0, 1, _reason(words)"),
    exact_edit(
        "the k-th root as an upper end certifies",
        "left, right = n * q**k, p**k\n    return (left > right) - (left < right)",
        "left, right = n * q**k, p**k\n    return (left > right) - (left <= right)",
    ),
    exact_edit("x^x refused at 1", "    if p < q:\n        return None\n", "    if p <= q:\n        return None\n"),
    exact_edit(
        "far above is below",
        "    if p > q * n.bit_length():\n        return -1",
        "    if p > q * n.bit_length():\n        return 1",
    ),
    exact_edit("isolation by variations alone", "    if sign_low * sign_high != -1:", "    if False:"),
    answer_edit("an answer needs no opening tag", NO_TAG, "    if False:\n"),
    answer_edit("no limit on the body", "if end - begin <= BODY_LIMIT else", "if True else"),
    answer_edit("the body is limited one character short", "<= BODY_LIMIT else", "< BODY_LIMIT else"),
    answer_edit("one digit too many is read", "DIGIT_LIMIT = 80", "DIGIT_LIMIT = 81"),
    answer_edit("the last digit is refused", "DIGIT_LIMIT = 80", "DIGIT_LIMIT = 79"),
    answer_edit("only the numerator's text is limited", " or len(bottom) > DIGIT_LIMIT:", ":"),
    answer_edit("the size limit itself is refused", SIZE, SIZE.replace("<=", "<")),
    answer_edit("the size limit of x^x is a little larger", "10**5, 8, _xx_side", "11**5, 8, _xx_side"),
    Mutant(
        "a point never ends",
        (
            ("answer", ORDER, ORDER.replace("<", "<=")),
            ("answer", WIDTH, "    while not width:\n        pass\n" + WIDTH),
        ),
        hangs=True,
    ),
)
MUTANTS = THIRTY_FIVE + FURTHER


def mutated(mutant: Mutant) -> dict[str, str]:
    """The sources with the defect."""
    sources = dict(SOURCES)
    for module, old, new in mutant.edits:
        if sources[module].count(old) != 1:
            raise ValueError(f"{mutant.name}: {old!r} is in {module} {sources[module].count(old)} times, not once")
        sources[module] = sources[module].replace(old, new)
    return sources


def load(sources: dict[str, str]) -> Callable[..., Grade]:
    """The `grade` of changed sources, as a package of its own that keeps the errors of the real one."""
    package = "verify_gym_mutant"
    made = {package: ModuleType(package), **{f"{package}.{name}": ModuleType(f"{package}.{name}") for name in sources}}
    sys.modules.update(made)
    try:
        for name in ("exact", "answer"):
            module = made[f"{package}.{name}"]
            module.__package__ = package
            exec(compile(sources[name], f"<mutant {name}>", "exec"), module.__dict__)
            if name == "exact":
                module.VerifyGymError, module.RowError = exact.VerifyGymError, exact.RowError
        return made[f"{package}.answer"].grade
    finally:
        for name in made:
            del sys.modules[name]


@lru_cache
def inexact(source: str) -> frozenset[str]:
    return frozenset(faults(ast.parse(source)))


def judged(mutant: Mutant, planned: list[Control]) -> tuple[GateReport, list[str]]:
    """What the gate and the syntax-tree check find in a mutant."""
    sources = mutated(mutant)
    patience = {"patience": IN_TIME} if mutant.hangs else {}
    return plant(planned, load(sources), **patience), sorted(inexact(sources["exact"]) | inexact(sources["answer"]))


def kill_row(mutant: Mutant, planned: list[Control]) -> dict:
    """One row of the matrix: how many controls of each kind came out wrong."""
    report, syntax = judged(mutant, planned)
    late = [found for found in report.findings if found.got == "no grade in time"]
    counts = Counter(
        (found.control.group, found.control.planted.kind) for found in report.findings if found not in late
    )
    caught = {
        group: {k: n for (g, k), n in sorted(counts.items()) if g == group} for group in ("forgery", "green", "extra")
    }
    if late:
        by = "the deadline"
    elif caught["forgery"] or caught["green"]:
        by = "forgeries and greens"
    else:
        by = "extra controls" if caught["extra"] else "the syntax tree" if syntax else "nothing"
    first = mutant in THIRTY_FIVE
    return {"name": mutant.name, "first_35": first, "killed_by": by, "caught": caught, "syntax_tree": syntax}


def kinds() -> dict[str, list[str]]:
    """The names of all controls in the order of planting, by group."""
    rows = answer.Task("xx", "x", 0, {"n": 5}, (2, 1), (3, 1))
    return {
        "forgery": [planted.kind for planted in forgeries(rows)],
        "green": [planted.kind for planted in greens(rows)],
        "extra": [control.planted.kind for control in extra_controls()],
    }


def kill_matrix() -> dict:
    """Every mutant against every control."""
    planned = controls(heldout())
    rows = [kill_row(mutant, planned) for mutant in MUTANTS]
    first = [row for row in rows if row["first_35"]]
    clean = plant(planned, answer.grade)
    return {
        "gate": clean.line(),
        "extra": clean.extra_line(),
        "mutants": len(rows),
        "killed": sum(row["killed_by"] != "nothing" for row in rows),
        "first_35": len(first),
        "first_35_killed_by": dict(sorted(Counter(row["killed_by"] for row in first).items())),
        "controls": kinds(),
        "only_one_control": only_killers(rows),
        "rows": rows,
    }


def only_killers(rows: list[dict]) -> dict[str, list[str]]:
    """For each control that is the only one to notice some mutant, those mutants."""
    found: dict[str, list[str]] = {}
    for row in rows:
        noticed = [kind for group in row["caught"].values() for kind in group]
        if len(noticed) == 1:
            found.setdefault(noticed[0], []).append(row["name"])
    return dict(sorted(found.items()))


def matrix_json(matrix: dict) -> str:
    return json.dumps(matrix, indent=1, ensure_ascii=False) + "\n"


def matrix_markdown(matrix: dict) -> str:
    """The matrix as a page: each mutant, who notices it, and on how many rows or fixed controls."""
    lines = [
        "# Kill matrix",
        "",
        "Made by `python tests/verify_gym_mutants.py`; the numbers count controls that came out wrong.",
        "",
    ]
    lines += [matrix["gate"], "", matrix["extra"], ""]
    lines += [f"{matrix['killed']} of {matrix['mutants']} mutants killed.", ""]
    lines += ["| mutant | killed by | forgeries | greens | extras | syntax tree |", "|---|---|---|---|---|---|"]
    for row in matrix["rows"]:
        cells = [", ".join(f"{kind} {n}" for kind, n in row["caught"][group].items()) for group in ("forgery", "green")]
        cells += [", ".join(row["caught"]["extra"]), ", ".join(row["syntax_tree"])]
        star = "" if row["first_35"] else " (further)"
        lines.append(f"| {row['name']}{star} | {row['killed_by']} | " + " | ".join(cells) + " |")
    lines += ["", "Mutants that one control alone notices:", ""]
    lines += [f"- {kind}: {', '.join(names)}" for kind, names in matrix["only_one_control"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    matrix = kill_matrix()
    TARGET.write_text(matrix_json(matrix), encoding="utf-8")
    TARGET.with_suffix(".md").write_text(matrix_markdown(matrix), encoding="utf-8")
    print(matrix["gate"], matrix["extra"], matrix["first_35_killed_by"], sep="\n")
    for row in matrix["rows"]:
        print(f"{row['name']:45} {row['killed_by']}")


if __name__ == "__main__":
    main()
