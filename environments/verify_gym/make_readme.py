"""Write README.md. No number in it is typed: they come from the code, the score card, the kill matrix and the curriculum.

    python make_readme.py [--check]

With --check nothing is written: the file must already be what this program makes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosscheck import Crosscheck, control_answers, policy_answers
from scorecard import make_card
from verify_gym.answer import DIGIT_LIMIT, FAMILIES, REFUTED, VERDICTS, Grade, Task, grade
from verify_gym.cli import run_safely, say
from verify_gym.curriculum import curriculum_sha256, entry, heldout
from verify_gym.exact import VerifyGymError
from verify_gym.families import cluster_rank, limit_text, prompt
from verify_gym.policies import POLICIES, run_policy, score_table
from verify_gym.readiness import LEAST_DIFFERING, LEAST_MEAN, MOST_MEAN, SAMPLES, TASKS

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
SOURCE = "https://github.com/miniverl/miniverl/tree/main"
FILES = "https://github.com/miniverl/miniverl/blob/main/environments/verify_gym"


def load(path: Path) -> Any:
    """A JSON file beside this program."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise VerifyGymError(f"{path.name} is no JSON", "make it again, or restore it") from None


def checked_card() -> dict[str, Any]:
    """The score card, if it's what this code makes where the two deciders agree.

    Raises
    ------
    VerifyGymError : it was edited, or is of other code
    """
    made = make_card(Crosscheck(len(policy_answers()), len(control_answers()), []))
    if load(HERE / "scorecard.json") != made:
        raise VerifyGymError("scorecard.json isn't the score card of this code", "run scorecard.py first")
    return made


def mutants(card: dict[str, Any]) -> tuple[int, int]:
    """How many mutants the kill matrix has, and how many of them are killed."""
    matrix = load(HERE / "kill-matrix.json")
    try:
        killers = [row["killed_by"] for row in matrix["rows"]]
        if [matrix["gate"], matrix["extra"]] == card["gate"]:
            return len(killers), sum(killer != "nothing" for killer in killers)
    except (KeyError, TypeError):
        pass
    raise VerifyGymError("kill-matrix.json isn't of this gate", "run tests/verify_gym_mutants.py first")


def grades_of(policy: str) -> list[tuple[Task, Grade]]:
    """A reference policy's grades on the held-out set."""
    tasks = heldout()
    return [(task, grade(task, reply)) for task, reply in zip(tasks, run_policy(policy, tasks), strict=True)]


CONSTANTS = {
    "xx": ("the root of x^x = N", "p^p < N^q · q^p, for p/q ≥ 1"),
    "kroot": ("n^(1/k)", "p^k < n · q^k, for p/q > 0"),
    "poly": (
        "the root of an integer polynomial P in the stated interval (l, h)",
        "sign P(p/q) = sign P(l), for l ≤ p/q ≤ h",
    ),
}


def family_table() -> str:
    """The families with their deciding comparison and limits."""
    lines = ["| family | the constant x | `x > p/q` exactly when | size limit | cap |", "|---|---|---|---:|---:|"]
    for name, family in FAMILIES.items():
        constant, rule = CONSTANTS[name]
        lines.append(f"| `{name}` | {constant} | {rule} | {limit_text(family.size_limit)} | {family.cap} |")
    return "\n".join(lines)


def float_story(card: dict[str, Any]) -> str:
    """What the refuted column says about `float`, counted."""
    graded = grades_of("float")
    false = [task for task, got in graded if got.verdict == REFUTED]
    clusters = [task for task, _ in graded if task.family == "poly" and cluster_rank(task.index)[0]]
    missed = sum(task in clusters for task in false)
    by_family = {name: sum(task.family == name for task in false) for name in FAMILIES}
    entry, bisect = card["policies"]["float"], card["policies"]["bisect"]
    if entry["mean"] <= bisect["mean"]:
        raise VerifyGymError("`float` no longer beats bisection", "say something else in float_story")
    return f"""\
Read the refuted column first. `float` beats honest bisection on the mean, {entry["mean"]:.3f} to {bisect["mean"]:.3f}, while {len(false)} of its {card["tasks"]} brackets
are false: {missed} of the {len(clusters)} clustered polynomial roots and {by_family["poly"] - missed} of the other polynomials, {by_family["kroot"]} k-th roots, since `n ** (1/k)` isn't correctly rounded, and {by_family["xx"]} roots
of x^x. Another {entry["malformed"]} answers are over the size limit. A mean that hides false claims is a mean that a model can buy by guessing."""


def xx_ceiling() -> str:
    """How far the size limit lets an answer of `xx` go."""
    graded = [got for task, got in grades_of("cf") if task.family == "xx"]
    most = max(got.decimals or 0 for got in graded)
    return f"no `xx` answer of `cf` on the held-out set certifies more than {most} decimals"


def instance_sizes() -> dict[str, str]:
    """The ranges of the held-out set, in words."""
    params = {name: [task.params for task in heldout() if task.family == name] for name in FAMILIES}
    degrees = sorted({len(row["coefficients"]) - 1 for row in params["poly"]})
    largest = {
        "`xx`: N up to": max(row["n"] for row in params["xx"]),
        "`kroot`: n up to": max(row["n"] for row in params["kroot"]),
        "k up to": max(row["k"] for row in params["kroot"]),
    }
    sizes = ", ".join(f"{name} {value:,}".replace(",", " ") for name, value in largest.items())
    return {"sizes": sizes, "degrees": f"{degrees[0]} to {degrees[-1]}"}


def prompt_sample() -> str:
    """One whole prompt."""
    return prompt(heldout()[1]).rstrip()


def model_rows() -> str:
    """The rows of models, or that there are none."""
    rows = [load(path) for path in sorted(HERE.glob("models/*/row.json"))]
    if not rows:
        return "There are no model rows yet. `modelrow.py` makes one: a run with the model's id, its sampling, the date and every reply stored."
    keys = [word.lower() for word in VERDICTS]
    lines = [
        "",
        "| " + " | ".join(["model", "date", "samples", "mean reward", *keys]) + " |",
        "|---|---|" + "---:|" * (2 + len(keys)),
    ]
    for row in rows:
        counts = " | ".join(str(row[key]) for key in keys)
        lines.append(f"| `{row['model']}` | {row['date']} | {row['samples']} | {row['mean']:.3f} | {counts} |")
    return "\n".join(lines)


def readme_text() -> str:
    """The whole file."""
    card = checked_card()
    total, killed = mutants(card)
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    values = {
        "source": SOURCE,
        "files": FILES,
        **instance_sizes(),
        "version": project["version"],
        "v0": ", ".join(project["optional-dependencies"]["v0"]),
        "v1": ", ".join(project["optional-dependencies"]["v1"]),
        "families": family_table(),
        "caps": ", ".join(f"{family.cap} for `{name}`" for name, family in FAMILIES.items()),
        "digits": DIGIT_LIMIT,
        "scores": score_table(card),
        "policies": len(POLICIES),
        "float": float_story(card),
        "tasks": card["tasks"],
        "gate": "\n".join(card["gate"]),
        "mutants": total,
        "killed": killed,
        "twice": card["decided_twice"]["policies"] + card["decided_twice"]["controls"],
        "of_policies": card["decided_twice"]["policies"],
        "of_gate": card["decided_twice"]["controls"],
        "differences": card["decided_twice"]["differences"],
        "heldout": entry("heldout/v0").body["sha256"],
        "heldout_families": ", ".join(f"{n} of `{name}`" for name, n in entry("heldout/v0").body["families"].items()),
        "curriculum": curriculum_sha256(),
        "readiness_tasks": TASKS,
        "readiness_samples": SAMPLES,
        "least_differing": f"{LEAST_DIFFERING.numerator}/{LEAST_DIFFERING.denominator}",
        "least_mean": f"{LEAST_MEAN.numerator}/{LEAST_MEAN.denominator}",
        "most_mean": f"{MOST_MEAN.numerator}/{MOST_MEAN.denominator}",
        "xx_ceiling": xx_ceiling(),
        "prompt": prompt_sample(),
        "models": model_rows(),
    }
    text = (HERE / "README.template.md").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"{{{{{name}}}}}", str(value))
    if "{{" in text:
        raise VerifyGymError(f"README.template.md asks for {text[text.index('{{') :][:30]!r}", "give it a value here")
    return text


def deliver(check: bool) -> int:
    """Write the file, or compare it."""
    text = readme_text()
    if check and (not README.exists() or README.read_text(encoding="utf-8") != text):
        raise VerifyGymError("README.md isn't what this program makes", "run make_readme.py and look at what changed")
    if not check:
        README.write_text(text, encoding="utf-8", newline="\n")
    say(f"README.md, {len(text.splitlines())} lines{', as it should be' if check else ''}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing, compare with the file")
    options = parser.parse_args(argv)
    return run_safely(lambda: deliver(options.check))


if __name__ == "__main__":
    sys.exit(main())
