"""A trial, played against an editor of a few lines: what it opens, what counts, what is durable, and how it ends."""

from __future__ import annotations

import ast
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from crash import KILLED, killed_at
from hypothesis import given
from hypothesis import strategies as st
from responses_server import Server

from miniverl.campaign import policy, trial, turns
from miniverl.campaign.policy import ResponsesPolicy, ScriptPolicy, TapePolicy
from miniverl.campaign.records import read_record
from miniverl.campaign.trial import EndReason, NotScored, Trial
from miniverl.campaign.turns import Action, Logbook, TrialLimits, public_value
from miniverl.core import StoreError, compact_json, sha256_bytes

LIMITS = {
    "turns": 8,
    "evaluations": 2,
    "output_tokens": 64,
    "wall_seconds": 100,
    "command_seconds": 10,
    "grader_seconds": 5,
}
LOOK, DONE = {"kind": "evaluate"}, {"kind": "submit"}


def python(source: str) -> dict[str, str]:
    return {"kind": "python", "source": source}


GOOD, HARMFUL = python("w['a'] = 3.0"), python("w['b'] = -9.0")
BROKEN = python("w['a'] = 5.0\nraise RuntimeError('CANARY')")


@dataclass
class Answer:
    ok: bool = True
    stdout: Any = ""
    error_type: str | None = None
    error: str | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    timed_out: bool = False
    checkpoint: Mapping[str, Any] | None = None


class Editor:
    """Programs edit two numbers; best is 3 for both. What fails is undone."""

    def __init__(self, watch=lambda: None):
        self.weights = {"a": 1.0, "b": 1.0}
        self.calls: list[str] = []
        self.watch = watch

    def digest(self) -> str:
        return sha256_bytes(compact_json(self.weights))

    def python(self, source: str, seconds: float) -> Answer:
        self.watch()
        self.calls.append("python")
        trying = dict(self.weights)
        try:
            exec(source, {"w": trying})
        except Exception as error:
            return Answer(False, error_type=type(error).__name__, error=str(error))
        changed = {name: 1 for name in trying if trying[name] != self.weights[name]}
        self.weights = trying
        return Answer(changed=changed, checkpoint={"sha256": self.digest(), "bytes": 16})

    def evaluate(self, seconds: float) -> Any:
        self.watch()
        self.calls.append("evaluate")
        return {"equal": sum((value - 3.0) ** 2 for value in self.weights.values())}


class Played:
    """A trial in a folder: its end, its records, its editor."""

    def __init__(self, root: Path, actions, limits=None, editor=None, clock=None):
        self.root, self.editor = root, editor or Editor()
        chooser = TapePolicy(actions) if isinstance(actions, list) else actions
        self.book = Logbook(root / "history", root / "checkpoints", "m" * 64, "0001-agent-a-01", "d" * 64)
        for folder in (self.book.history, self.book.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        self.trial = Trial(self.book, self.editor, chooser, LIMITS | (limits or {}), *([clock] if clock else []))
        self.end = self.trial.run()
        self.turns = [json.loads(path.read_text()) for path in sorted(self.book.history.iterdir())]
        self.kept = [json.loads(path.read_text()) for path in sorted(self.book.checkpoints.iterdir())]

    @property
    def text(self) -> str:
        return "".join(path.read_text() for path in self.root.rglob("*") if path.is_file())


def chain(root: Path) -> list[str]:
    """Names of the records in the order of their links; fails unless all of them make one chain that begins at the dispatch."""
    found = {}
    for path in [*root.glob("history/*"), *root.glob("checkpoints/*")]:
        record = read_record(path, manifest_sha256="m" * 64, trial="0001-agent-a-01")
        assert found.setdefault(record["previous_sha256"], path) is path
    link, order = "d" * 64, []
    while link in found:
        path = found.pop(link)
        order.append(f"{path.parent.name}/{path.stem}")
        link = sha256_bytes(path.read_bytes())
    assert not found
    return order


SEEN: list[str] | None = None
WATCHED = {
    "open",
    "os.link",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.listdir",
    "os.scandir",
    "os.chmod",
    "os.truncate",
}


def _watch(event: str, args: tuple) -> None:
    if SEEN is not None and event in WATCHED and isinstance(args[0], (str, bytes, os.PathLike)):
        SEEN.extend(
            os.fspath(arg) for arg in args[:2] if isinstance(arg, (str, bytes, os.PathLike)) and len(str(arg)) > 2
        )


sys.addaudithook(_watch)


def test_a_trial_opens_nothing_but_its_two_folders(tmp_path):
    global SEEN
    Played(tmp_path / "warm", [GOOD, DONE])  # modules that load late are loaded now
    mine = tmp_path / "trials" / "t"
    (tmp_path / "restricted").mkdir()
    (tmp_path / "restricted" / "grade.json").write_text("private")
    SEEN = []
    try:
        Played.__init__(played := object.__new__(Played), mine, [GOOD, BROKEN, LOOK, HARMFUL, DONE])
    finally:
        seen, SEEN = SEEN, None
    assert played.end.reason == EndReason.SUBMITTED and len(seen) > 20
    own = (str(mine), str(mine / "history"), str(mine / "checkpoints"), str(tmp_path / "trials"))
    strange = [p for p in seen if p not in own and Path(p).parent not in (mine / "history", mine / "checkpoints")]
    assert strange == []


def test_the_modules_of_a_trial_know_no_other_place_and_no_grade():
    for module in (turns, trial, policy):
        tree = ast.parse(Path(module.__file__).read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        rooms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
        assert not names & {"Layout", "open", "shutil", "replace", "rename"}
        assert rooms <= {"records", "turns", "trial", "config", "config_sections", "core", "store", ""} | {"..core"}


def test_the_last_successful_edit_counts_also_when_it_is_worse(tmp_path):
    played = Played(tmp_path, [GOOD, LOOK, HARMFUL, LOOK, DONE])
    scores = [turn["result"]["equal"] for turn in played.turns if turn["kind"] == "evaluate"]
    assert scores[1] > scores[0] and played.end.checkpoint == played.editor.digest() == played.kept[-1]["sha256"]
    assert played.editor.weights == {"a": 3.0, "b": -9.0} and played.end.exportable
    assert [kept["parent"] for kept in played.kept] == [None, played.kept[0]["sha256"]]


def test_a_failed_action_does_not_advance_and_its_message_stays_out_of_the_history(tmp_path):
    played = Played(tmp_path, [GOOD, python("w['a'] = 5.0\nraise RuntimeError('CAN' + 'ARY')"), DONE])
    assert played.editor.weights == {"a": 3.0, "b": 1.0} and len(played.kept) == 1
    assert [turn["checkpoint"] for turn in played.turns] == [played.kept[0]["sha256"]] * 3
    assert played.turns[1]["result"] == {"stdout": "", "changed": {}, "error_type": "RuntimeError"}
    assert "CANARY" not in played.text and played.end.details == {2: "CANARY"}


def test_evaluations_are_capped_and_those_inside_a_program_are_not_counted(tmp_path):
    played = Played(tmp_path, [LOOK, LOOK, LOOK, python("for _ in range(50): sum(w.values())"), DONE])
    assert [turn["status"] for turn in played.turns] == ["ok", "ok", "refused", "ok", "ok"]
    assert [turn["evaluations_left"] for turn in played.turns] == [1, 0, 0, 0, 0]
    assert played.end.evaluations == 2 and played.editor.calls.count("evaluate") == 2
    assert played.turns[2]["result"] == {"reason": "evaluations_exhausted"}


@pytest.mark.parametrize("limit", [1, 3, 4])
def test_turns_bound_dispatches_of_every_kind(tmp_path, limit):
    played = Played(tmp_path, [LOOK, BROKEN, GOOD, DONE, GOOD], {"turns": limit})
    assert (played.end.turns, len(played.turns), len(played.editor.calls)) == (limit, limit, min(limit, 3))
    assert played.end.reason == (EndReason.SUBMITTED if limit == 4 else EndReason.TURN_LIMIT)


def test_an_edit_that_changes_nothing_makes_no_checkpoint(tmp_path):
    played = Played(tmp_path, [python("x = 1"), GOOD, python("y = 2")])
    assert [k["index"] for k in played.kept] == [1, 2] and played.end.reason == EndReason.POLICY_END
    assert played.kept[0]["changed"] == {} and played.turns[2]["checkpoint"] == played.turns[1]["checkpoint"]


def test_every_record_is_durable_before_the_next_action_starts(tmp_path):
    def watch():
        assert len(list((tmp_path / "history").iterdir())) == len(editor.calls)
        assert not list(tmp_path.rglob(".tmp-*"))

    editor = Editor(watch)
    played = Played(tmp_path, [GOOD, LOOK, BROKEN, HARMFUL, LOOK, DONE], editor=editor)
    assert played.end.reason == EndReason.SUBMITTED and len(editor.calls) == 5
    assert chain(tmp_path) == [
        *("checkpoints/0001", "history/0001", "history/0002", "history/0003"),
        *("checkpoints/0002", "history/0004", "history/0005", "history/0006"),
    ]


def test_a_trial_killed_anywhere_leaves_a_whole_chain_and_ran_at_most_one_action_more(tmp_path):
    tape = [GOOD, LOOK, BROKEN, HARMFUL, DONE]

    def work(root, say):
        class Told(Editor):
            def python(self, source, seconds):
                say("x")
                return super().python(source, seconds)

            def evaluate(self, seconds):
                say("x")
                return super().evaluate(seconds)

        Played(root, tape, editor=Told())

    _, _, total = killed_at(None, lambda say: work(tmp_path / "whole", say))
    assert total > 30
    for limit in range(3, total + 1):  # the first two make the folders
        root = tmp_path / str(limit)
        status, ran, _ = killed_at(limit, lambda say, root=root: work(root, say))
        assert status == KILLED
        for folder in ("history", "checkpoints"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            for stray in (root / folder).glob(".tmp-*"):
                stray.unlink()
        order = chain(root)
        recorded = sum(name.startswith("history") for name in order)
        assert recorded <= len(tape) and len(ran) <= recorded + 1
        for path in (root / "history").iterdir():
            checkpoint = json.loads(path.read_text())["checkpoint"]
            kept = [json.loads(p.read_text())["sha256"] for p in (root / "checkpoints").iterdir()]
            assert checkpoint is None or checkpoint in kept


def test_records_are_private_and_never_overwritten(tmp_path):
    old = os.umask(0)
    try:
        played = Played(tmp_path / "one", [GOOD, DONE])
    finally:
        os.umask(old)
    assert {p.stat().st_mode & 0o777 for p in played.root.rglob("*.json")} == {0o600}
    before = played.text
    with pytest.raises(StoreError, match="exists already"):
        Played(tmp_path / "one", [HARMFUL, DONE])
    assert played.text == before


class Slow(Editor):
    """A clock that advances by what an action takes."""

    now = 0.0

    def __init__(self, takes):
        super().__init__()
        self.takes, self.given = list(takes), []

    def _pass(self, seconds):
        self.given.append(seconds)
        takes = self.takes.pop(0)
        self.now += min(takes, seconds)
        return takes > seconds

    def python(self, source, seconds):
        late = self._pass(seconds)
        return Answer(False, error_type="TimeoutError", timed_out=True) if late else super().python(source, seconds)


def test_a_command_that_takes_too_long_is_cut_and_the_trial_goes_on(tmp_path):
    editor = Slow([1.0, 60.0, 1.0])
    played = Played(tmp_path, [GOOD, HARMFUL, python("w['b'] = 2.0"), DONE], editor=editor, clock=lambda: editor.now)
    assert [turn["status"] for turn in played.turns] == ["ok", "timed_out", "ok", "ok"] and editor.given == [10, 10, 10]
    assert editor.weights == {"a": 3.0, "b": 2.0} and played.end.reason == EndReason.SUBMITTED


@pytest.mark.parametrize("takes, given", [([8.0, 60.0], [10, 7.0]), ([60.0, 60.0], [10, 5.0]), ([5.0, 10.0], [10, 10])])
def test_the_wall_ends_a_trial_without_an_artifact(tmp_path, takes, given):
    editor = Slow(takes)
    played = Played(tmp_path, [GOOD, GOOD, GOOD], {"wall_seconds": 15}, editor, clock=lambda: editor.now)
    assert editor.given == given and played.end.turns == 2
    assert (played.end.reason, played.end.exportable, played.end.reason.deadline) == ("wall_timeout", False, True)


def test_a_policy_that_thinks_too_long_starts_no_action(tmp_path):
    now = [0.0]

    class Thinker(TapePolicy):
        def next(self, history, seconds):
            now[0] += seconds + 1
            return super().next(history, seconds)

    played = Played(tmp_path, Thinker([GOOD]), clock=lambda: now[0])
    assert played.end.reason == EndReason.WALL_TIMEOUT and played.editor.calls == [] and played.turns == []


def test_a_policy_is_told_what_time_is_left_and_not_asked_when_there_is_none(tmp_path):
    asked = []

    class Asked(TapePolicy):
        def next(self, history, seconds):
            asked.append(seconds)
            return super().next(history, seconds)

    editor = Slow([4.0, 60.0])
    limits = {"wall_seconds": 12, "turns": 2}
    played = Played(tmp_path, Asked([GOOD] * 3), limits, editor, lambda: editor.now)
    assert asked == [12.0, 8.0] and played.end.reason == EndReason.WALL_TIMEOUT


class Failing(Editor):
    def __init__(self, trouble=None, answer=None, score=None):
        super().__init__()
        self.trouble, self.answer, self.score = trouble, answer, score

    def python(self, source, seconds):
        if self.trouble:
            raise self.trouble
        return self.answer

    def evaluate(self, seconds):
        if self.trouble:
            raise self.trouble
        return self.score


class Blind(Editor):
    def evaluate(self, seconds):
        raise NotScored("the weights give no number", hint="undo the last edit")


@pytest.mark.parametrize("action", [GOOD, LOOK])
@pytest.mark.parametrize(
    "fault, reason", [(OSError("CANARY"), "editor_error"), (TimeoutError("CANARY"), "editor_timeout")]
)
def test_an_editor_that_fails_ends_the_trial_and_says_nothing_in_public(tmp_path, fault, reason, action):
    played = Played(tmp_path, [action, GOOD], editor=Failing(fault))
    assert (played.end.reason, played.end.exportable, len(played.turns)) == (reason, False, 1)
    assert played.turns[0]["status"] == "unknown" and "CANARY" in played.end.error and "CANARY" not in played.text
    assert played.end.reason.deadline == (reason == "editor_timeout")


def test_an_edit_whose_checkpoint_is_lost_ends_the_trial(tmp_path):
    played = Played(tmp_path, [GOOD, DONE], editor=Failing(answer=Answer(changed={"a": 1})))
    assert (played.end.reason, played.end.exportable, played.kept) == (EndReason.CHECKPOINT_FAILED, False, [])


def test_weights_that_give_no_score_are_the_agents_affair(tmp_path):
    played = Played(tmp_path, [GOOD, LOOK, HARMFUL, DONE], editor=Blind())
    assert [turn["status"] for turn in played.turns] == ["ok", "failed", "ok", "ok"] and played.end.exportable
    assert played.turns[1]["result"] == {"error_type": "NotScored"} and played.turns[1]["evaluations_left"] == 1
    assert played.trial.history[1].detail.startswith("NotScored: the weights give no number")


def test_an_editor_that_could_not_bring_a_checkpoint_out_ends_the_trial(tmp_path):
    class Parted(Failing):
        def python(self, source, seconds):
            self.fault = OSError("no receipt")
            self.fault.detail = "CANARY"
            raise self.fault

    played = Played(tmp_path, [GOOD, DONE], editor=Parted())
    assert played.end.reason == EndReason.CHECKPOINT_FAILED and len(played.turns) == 1
    assert "CANARY" in played.end.error and "CANARY" not in played.text


def test_an_edit_that_leads_back_to_the_original_weights_needs_no_checkpoint(tmp_path):
    class Sparse(Editor):
        def python(self, source, seconds):
            answer = super().python(source, seconds)
            return replace(answer, checkpoint=None) if self.weights == {"a": 1.0, "b": 1.0} else answer

    played = Played(tmp_path, [GOOD, python("w['a'] = 1.0"), python("pass"), DONE], editor=Sparse())
    assert [kept["sha256"] is None for kept in played.kept] == [False, True] and played.end.checkpoint is None
    assert [turn["checkpoint"] is None for turn in played.turns] == [False, True, True, True] and played.end.exportable


@pytest.mark.parametrize("score", [None, [], "low", {"x": "y" * 40_000, "z": ["y" * 16_000] * 20}])
def test_an_evaluation_that_is_no_score_is_a_failure_of_the_editor(tmp_path, score):
    assert Played(tmp_path, [LOOK], editor=Failing(score=score)).end.reason == EndReason.EDITOR_ERROR


@pytest.mark.parametrize(
    "answer", [None, Answer(stdout=7), Answer(stdout=b"x"), Answer(checkpoint={"sha": 1}), Answer(checkpoint=7)]
)
def test_an_answer_of_another_form_is_a_failure_of_the_editor(tmp_path, answer):
    played = Played(tmp_path, [GOOD, DONE], editor=Failing(answer=answer))
    assert played.end.reason == EndReason.EDITOR_ERROR and played.turns[0]["status"] == "unknown"


def test_what_a_program_prints_is_bounded_and_writable(tmp_path):
    loud = Answer(stdout="a\ud800" + "x" * 10**6, changed={"t": 3}, checkpoint={"sha256": "c" * 64, "bytes": 1})
    played = Played(
        tmp_path, [GOOD, LOOK, DONE], editor=Failing(answer=loud, score={"equal": math.nan, "all": [math.inf]})
    )
    stdout = played.turns[0]["result"]["stdout"]
    assert stdout.startswith("a\\ud800") and "characters left out" in stdout and len(stdout) < 17_000
    assert played.turns[1]["result"] == {"equal": "nan", "all": ["inf"]} and played.end.exportable


@pytest.mark.parametrize("fault", [ValueError("CANARY"), RecursionError("CANARY")])
def test_a_policy_that_fails_ends_the_trial(tmp_path, fault):
    class Bad(TapePolicy):
        def next(self, history, seconds):
            if history:
                raise fault
            return super().next(history, seconds)

    played = Played(tmp_path, Bad([GOOD]))
    assert (played.end.reason, played.end.turns) == (EndReason.POLICY_ERROR, 1) and "CANARY" in played.end.error
    assert not played.end.exportable and "CANARY" not in played.text


def test_an_interruption_passes_through(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Played(tmp_path, [GOOD], editor=Failing(KeyboardInterrupt()))


def test_a_script_submits_what_it_made_or_has_no_result(tmp_path):
    made = Played(tmp_path / "a", ScriptPolicy(GOOD["source"]))
    assert (made.end.reason, made.end.turns, made.end.checkpoint) == ("submitted", 2, made.editor.digest())
    failed = Played(tmp_path / "b", ScriptPolicy(BROKEN["source"]))
    assert (failed.end.reason, failed.end.exportable, failed.end.turns) == (EndReason.SCRIPT_FAILED, False, 1)
    assert "CANARY" in failed.end.error
    tight = Played(tmp_path / "c", ScriptPolicy(GOOD["source"]), {"turns": 1})
    assert (tight.end.reason, tight.end.exportable, tight.end.checkpoint) == ("turn_limit", True, tight.editor.digest())


def test_a_tape_reports_bytes_and_no_tokens(tmp_path):
    played = Played(tmp_path, [GOOD, LOOK, DONE, GOOD])
    assert played.end.usage == {
        "unit": "utf8_bytes",
        "actions": 3,
        "bytes": len(GOOD["source"]),
        "provider_tokens": None,
    }


KEY = {"EDIT_MODEL": "some-model", "EDIT_KEY": "sk-CANARY-credential"}
SETTINGS = {"model_env": "EDIT_MODEL", "credential_env": "EDIT_KEY", "prompt_bytes": 20_000, "request_seconds": 5}


def live(server: Server, limits=None) -> ResponsesPolicy:
    return ResponsesPolicy(
        SETTINGS, server.url, "EDIT_KEY", instruction="INSTRUCTION", limits=LIMITS | (limits or {}), environ=KEY
    )


def test_a_live_trial_leaves_neither_route_nor_credential_behind(tmp_path):
    script = [json.dumps(GOOD), "no action", KEY["EDIT_KEY"], json.dumps(LOOK), json.dumps(DONE)]
    with Server(script) as server:
        played = Played(tmp_path, live(server))
        host = server.url.split("/")[2]
    assert [turn["status"] for turn in played.turns] == ["ok", "invalid", "invalid", "ok", "ok"]
    assert [turn["result"] for turn in played.turns[1:3]] == [{"reply": "no action"}, {"reply": ""}]
    everything = played.text + repr(played.end) + repr(vars(played.trial.policy)) + repr(played.trial.history)
    assert "CANARY" not in everything and host not in everything and server.url not in everything
    assert all("CANARY" not in json.dumps(seen.body) for seen in server.requests)
    assert played.end.usage["requests"] == played.end.turns == 5 and played.end.usage["output_tokens"] == 25


def test_turns_bound_requests_also_when_no_reply_is_an_action(tmp_path):
    with Server(["nonsense"]) as server:
        played = Played(tmp_path, live(server, {"turns": 3}), {"turns": 3})
    assert len(server.requests) == 3 and played.end.reason == EndReason.TURN_LIMIT and played.editor.calls == []


def test_a_request_that_fails_is_not_repeated_and_keeps_the_history(tmp_path):
    with Server([json.dumps(GOOD)], fail={1}) as server:
        played = Played(tmp_path, live(server))
    assert len(server.requests) == 2 and played.end.turns == 1 and played.end.reason == EndReason.POLICY_ERROR
    assert "answered 500" in played.end.error and "CANARY" not in played.end.error
    assert played.end.usage["requests"] == 2 and played.end.usage["responses"] == 1


def test_a_prompt_over_the_ceiling_ends_the_trial_with_its_artifact(tmp_path):
    loud = Answer(stdout="x" * 16_000, changed={"t": 3}, checkpoint={"sha256": "c" * 64, "bytes": 1})
    with Server([json.dumps(GOOD)]) as server:
        played = Played(tmp_path, live(server), editor=Failing(answer=loud))
    assert (played.end.reason, played.end.exportable, played.end.turns) == (EndReason.PROMPT_LIMIT, True, 2)
    assert len(server.requests) == 2 and all(seen.size <= SETTINGS["prompt_bytes"] for seen in server.requests)


ACTIONS = st.lists(
    st.sampled_from([GOOD, HARMFUL, BROKEN, LOOK, DONE, python("w['a'] += 1"), python("pass"), python("1/0")]),
    max_size=12,
)


@given(actions=ACTIONS, turn_limit=st.integers(1, 9), cap=st.integers(1, 4))
def test_any_tape_gives_what_a_plain_loop_gives(tmp_path_factory, actions, turn_limit, cap):
    weights, left, dispatched = {"a": 1.0, "b": 1.0}, cap, 0
    for action in actions[:turn_limit]:
        dispatched += 1
        if action["kind"] == "submit":
            break
        if action["kind"] == "evaluate":
            left = max(0, left - 1)
            continue
        trying = dict(weights)
        try:
            exec(action["source"], {"w": trying})
            weights = trying
        except Exception:
            pass
    played = Played(tmp_path_factory.mktemp("t"), actions, {"turns": turn_limit, "evaluations": cap})
    assert played.editor.weights == weights and played.end.turns == len(played.turns) == dispatched
    assert (
        played.end.evaluations == cap - left
        and chain(played.root)[-1:] == [f"history/{dispatched:04d}"][: dispatched > 0]
    )
    assert played.end.exportable and [t["index"] for t in played.turns] == list(range(1, dispatched + 1))


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(JSONISH)
def test_whatever_an_editor_says_can_be_recorded(value):
    compact_json(public_value(value))


def test_limits_of_a_section_and_of_a_record_are_the_same():
    assert TrialLimits.of(LIMITS) == TrialLimits.of(TrialLimits(8, 2, 100, 10))
    assert Action("submit").to_record() == DONE
