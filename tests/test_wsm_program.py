"""Programs on a model: what counts is kept, what fails leaves no trace."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import ConfigError
from miniverl.wsm.model import WeightModel
from miniverl.wsm.program import OUTPUT_CAP, execute_program
from miniverl.wsm.tiny import tiny_snapshot

NORM = "model.norm.weight"
CASES = [{"prompt": "ab", "target": "cd"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_snapshot(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def model(tiny) -> WeightModel:
    return WeightModel.load(tiny)


@pytest.fixture(scope="module")
def shared(tiny) -> WeightModel:
    return WeightModel.load(tiny)


def copy_of(model: WeightModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.weights.items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


WRECKS = {
    "zero everything": "for w in model.weights.values(): w.zero_()",
    "nan": f"model.weights['{NORM}'].fill_(float('nan'))",
    "new storage": "for p in model.module.parameters(): p.data = p.data * 2",
    "other shape": "model.module.model.norm.weight.data = torch.ones(3)",
    "other dtype": "model.module.model.norm.weight.data = torch.ones(32, dtype=torch.float64)",
    "other layout": "e = model.module.model.embed_tokens.weight; e.data = e.data.t().contiguous().t() * 0",
    "double": "model.module.double()",
    "untie": "model.module.lm_head.weight = torch.nn.Parameter(torch.zeros(257, 32))",
    "drop a layer": "model.module.model.layers.pop(0)",
    "drop a module": "del model.module.model.norm",
    "add a parameter": "model.module.extra = torch.nn.Parameter(torch.ones(1))",
    "numpy": f"model.weights['{NORM}'].numpy()[:] = 7",
    "load": "model.load_tensors({n: w * 0 for n, w in model.weights.items()})",
    "gradients": "model.module.requires_grad_(True); model.module.train()",
}


@pytest.mark.parametrize("wreck", WRECKS.values(), ids=WRECKS)
def test_a_failed_program_leaves_the_weights_and_the_score(model, wreck):
    assert execute_program(model, f"model.weights['{NORM}'][:4] *= 2").changed == {NORM: 4}
    before, score = copy_of(model), model.evaluate(CASES)
    held = model.weights[NORM]
    ended = execute_program(model, f"import torch\n{wreck}\nraise OSError('enough')")
    assert (ended.ok, ended.error_type, ended.error, dict(ended.changed)) == (False, "OSError", "line 3: enough", {})
    assert same(before, copy_of(model)) and model.evaluate(CASES) == score and model.changed() == {NORM: 4}
    assert not any(p.requires_grad for p in model.module.parameters()) and not model.module.training
    held += 1
    assert torch.equal(model.weights[NORM], held), "a tensor that was handed out before is cut off"


STRUCTURE = ("other shape", "other dtype", "double", "untie", "drop a layer", "drop a module", "add a parameter")


@pytest.mark.parametrize("wreck", STRUCTURE)
def test_a_program_that_breaks_the_structure_fails_though_it_ends(model, wreck):
    before = copy_of(model)
    ended = execute_program(model, f"import torch\n{WRECKS[wreck]}")
    assert ended.error_type == "DataError" and same(before, copy_of(model))
    model.evaluate(CASES)


@given(
    st.lists(
        st.tuples(st.sampled_from([NORM, "model.embed_tokens.weight"]), st.integers(0, 31), st.booleans()), max_size=6
    )
)
@settings(max_examples=20, deadline=None)
def test_only_the_programs_that_end_count(shared, steps):
    model = shared
    mirror = copy_of(model)
    for name, row, good in steps:
        ended = execute_program(model, f"model.weights[{name!r}][{row}] += 0.5\n{'pass' if good else '1 / 0'}")
        if good:
            mirror[name][row] += 0.5
        assert ended.ok is good and dict(ended.changed) == ({name: mirror[name][row].numel()} if good else {})
        assert same(mirror, copy_of(model))


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("x = 1\nx +", "SyntaxError", "line 2: invalid syntax"),
        ("\0", "SyntaxError", "source code string cannot contain null bytes"),
        ("def f():\n    return f()\nf()", "RecursionError", "line 2: maximum recursion depth exceeded"),
        ("import sys\nsys.exit(3)", "SystemExit", "line 2: 3"),
        ("class Mine(BaseException): pass\nraise Mine('x')", "Mine", "line 2: x"),
        ("raise GeneratorExit", "GeneratorExit", "line 1: "),
        ("import nothing_of_this_name", "ModuleNotFoundError", "line 1: No module named 'nothing_of_this_name'"),
        ("def f():\n    1 / 0\n\n\nf()", "ZeroDivisionError", "line 2: division by zero"),
        ("raise ValueError('a\\x00b\\nc')", "ValueError", "line 1: a\x00b\nc"),
    ],
)
def test_every_end_is_a_short_record(model, source, kind, message):
    ended = execute_program(model, source)
    assert (ended.ok, ended.error_type) == (False, kind) and ended.error.startswith(message)
    assert len(ended.error) <= 500 and model.changed() == {}


@pytest.mark.parametrize(
    "loop", ["while True: pass", "import time\ntime.sleep(30)", "try:\n  while True: pass\nexcept BaseException: pass"]
)
def test_a_program_ends_when_its_time_is_over(model, loop):
    begun = time.monotonic()
    ended = execute_program(model, f"model.weights['{NORM}'].zero_()\n{loop}", seconds=0.1)
    assert (ended.error_type, ended.error) == ("TimeoutError", "the program ran longer than 0.1 s")
    assert time.monotonic() - begun < 5 and model.changed() == {}


def test_a_program_in_time_leaves_no_alarm(model):
    assert execute_program(model, "pass", seconds=0.2).ok
    time.sleep(0.3)


def test_no_time_limit_outside_the_main_thread(model):
    seen = []

    def work():
        seen.append(execute_program(model, "print(1)").stdout)
        try:
            execute_program(model, "pass", seconds=1)
        except ConfigError as error:
            seen.append(error.message)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["1\n", "seconds needs the main thread of a POSIX process"]


def test_output_in_pieces_is_cut_once(model):
    ended = execute_program(model, "for i in range(3000): print('x' * 99)")
    assert ended.ok and ended.stdout[:OUTPUT_CAP].count("\n") == OUTPUT_CAP // 100
    assert ended.stdout.endswith(f"\n[{300_000 - OUTPUT_CAP} more characters]")


def test_output_before_a_failure_is_kept(model):
    ended = execute_program(model, "print('so far')\nraise ValueError")
    assert ended.stdout == "so far\n" and not ended.ok


def test_a_worse_edit_counts_as_well(model):
    first = model.evaluate(CASES)
    assert execute_program(model, f"model.weights['{NORM}'] *= -3").ok
    assert model.evaluate(CASES).equal > first.equal and model.changed() == {NORM: 32}


def test_an_error_of_ours_brings_its_hint(model):
    ended = execute_program(model, "model.weights['model.norm'] *= 2")
    assert ended.error == "line 1: there is no weight 'model.norm' (the nearest name is 'model.norm.weight')"
