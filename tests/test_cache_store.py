"""The teacher cache under crashes, damage and arbitrary records."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from crash import KILLED, killed_at
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.cache.shards import ShardReader, encode_shard
from miniverl.cache.store import TeacherCache, cache_stats, validate_cache
from miniverl.core import CacheError, MiniVerlError
from miniverl.schemas.cache import CacheIdentity, TeacherTargets

SPANS = ("assistant_text", "assistant_tool_call", "assistant_final")
DURABLE = ("write", "fsync", "link", "unlink", "replace", "rename", "ftruncate")


def identity(**changes) -> CacheIdentity:
    base = {"teacher_model_id": "t", "tokenizer_fingerprint": "f", "vocab_size": 190, "top_k": 8, "temperature": 1.0}
    return CacheIdentity(**(base | changes))


def targets(name: str, version: int, *, n=5, k=8, vocab=190, weights=None, seed=0, first=0, step=1) -> TeacherTargets:
    rng = np.random.default_rng([seed, version, n])
    logits = rng.normal(0, 2, (n, vocab))
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logp, axis=1)[:, :k]
    top = np.take_along_axis(logp, ids, 1).astype(np.float32)
    with np.errstate(divide="ignore"):
        tail = np.full(n, -np.inf) if k == vocab else np.log1p(-np.exp(top.astype(np.float64)).sum(1))
    return TeacherTargets(
        name,
        version,
        first + step * np.arange(n, dtype=np.int64),
        rng.integers(0, vocab, n),
        np.ones(n, np.float32) if weights is None else np.array(weights, np.float32),
        ids.astype(np.int32),
        top,
        tail.astype(np.float32),
        k == vocab,
        tuple(SPANS[i] for i in rng.integers(0, 3, n)),
    )


def batch(version: int, count: int = 5) -> list[TeacherTargets]:
    return [targets(f"calc:{i}:v{version}", version, seed=i) for i in range(count)]


# --- a process that dies before its n-th durable operation


def scenario(cache: TeacherCache, say) -> None:
    """One cycle and a checkpoint: write two shards, flush a third, prune the older version, compact."""
    cache.write(batch(2))
    cache.flush()
    say("flushed")
    cache.prune({2})
    say("pruned")
    cache.snapshot()
    say("snapshot")


def short_life(cache: TeacherCache, say) -> None:
    """A cache that never takes a snapshot: pruned files are deleted at once."""
    for version in (1, 2, 3):
        cache.write(batch(version, 3))
        cache.flush()
        say(f"{version}")
        cache.prune({version})


def die_at(folder: Path, n: int, play=scenario) -> tuple[bool, str]:
    """Run the scenario in a child that exits before durable operation `n`; (died, last milestone)."""

    def work(say):
        play(TeacherCache.open(folder, identity(), entries_per_shard=2), lambda what: say(f"{what} "))

    status, said, _ = killed_at(n, work, DURABLE)
    assert status in (0, KILLED)
    return status == KILLED, said.split()[-1] if said else "started"


@pytest.fixture
def base(tmp_path):
    """A cache with three shards of version 1, a checkpoint of it, and its files."""
    folder = tmp_path / "base"
    with TeacherCache.open(folder, identity(), entries_per_shard=2) as cache:
        cache.write(batch(1))
        state = cache.snapshot()
    return folder, state


def test_a_crash_at_any_operation_leaves_a_sound_cache_that_resumes_to_the_same_bytes(base, tmp_path):
    folder, state = base
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    with TeacherCache.open(whole, identity()) as cache:
        cache.restore(state)
        scenario(cache, lambda what: None)
        final, final_stats, final_written = cache.ids(), cache.stats(), cache.bytes_written_total
    milestones, n, died = set(), 0, True
    while died:
        n += 1
        place = tmp_path / f"crash-{n}"
        shutil.copytree(folder, place)
        died, reached = die_at(place, n)
        milestones.add(reached)
        assert validate_cache(place) == []
        cache = TeacherCache.open(place, identity())
        versions = cache.stats().policy_versions
        assert {"started": {(1,), (1, 2)}, "flushed": {(1, 2), (2,)}}.get(reached, {(2,)}) >= {versions}
        for name in cache.ids():
            version, seed = int(name.split(":v")[1]), int(name.split(":")[1])
            assert cache.read(name, version).equals(targets(name, version, seed=seed))
        assert cache.restore(state).lost == ()
        assert {p.name: p.read_bytes() for p in place.iterdir()} == files
        scenario(cache, lambda what: None)
        assert (cache.ids(), cache.stats(), cache.bytes_written_total) == (final, final_stats, final_written)
        assert (place / "index.jsonl").read_bytes() == (whole / "index.jsonl").read_bytes()
        cache.close()
        shutil.rmtree(place)
    assert milestones == {"started", "flushed", "pruned", "snapshot"} and n > 30


def test_a_crash_never_leaves_the_index_pointing_at_a_deleted_or_unwritten_file(tmp_path):
    n, died, deleted = 0, True, set()
    while died:
        n += 1
        place = tmp_path / f"crash-{n}"
        died, reached = die_at(place, n, short_life)
        if not (place / "index.jsonl").exists():
            assert reached == "started" and not list(place.glob("shard-*"))
            continue
        assert validate_cache(place) == []
        with TeacherCache.open(place, identity()) as cache:
            assert reached == "started" or int(reached) in cache.stats().policy_versions
            deleted.add(cache._state.next_number - len(list(place.glob("shard-*"))))
            cache.write(batch(7, 2))
            cache.flush()
            assert cache.read("calc:1:v7", 7).equals(targets("calc:1:v7", 7, seed=1))
        shutil.rmtree(place)
    assert deleted >= {0, 2, 4}  # files really were deleted along the way


def test_an_orphan_is_harmless_and_its_number_is_never_taken(base):
    folder, _ = base
    (folder / "shard-00009.safetensors").write_bytes(b"orphan")
    assert validate_cache(folder) == [] and cache_stats(folder).num_trajectories == 5
    with TeacherCache.open(folder, identity()) as cache:
        cache.write(batch(2))
        cache.flush()
    assert (folder / "shard-00009.safetensors").read_bytes() == b"orphan"
    assert sorted(p.name for p in folder.glob("shard-*"))[-3:] == [f"shard-{n:05d}.safetensors" for n in (10, 11, 12)]


def test_numbers_are_not_reused_after_prune_and_reopen(tmp_path):
    for version in range(1, 4):
        with TeacherCache.open(tmp_path, identity(), entries_per_shard=2) as cache:
            cache.write(batch(version, 2))
            cache.prune(0)
            assert cache.ids() == ()
    with TeacherCache.open(tmp_path, identity()) as cache:
        cache.write(batch(9, 2))
        assert cache._state.shards.keys() == {3}


def test_prune_survives_a_file_that_cannot_be_deleted(base, monkeypatch):
    folder, _ = base
    cache = TeacherCache.open(folder, identity())
    cache.snapshot()
    cache.write(batch(2))
    cache.flush()
    cache.snapshot()

    def refuse(*args, **kwargs):
        raise PermissionError("busy")

    monkeypatch.setattr(os, "unlink", refuse)
    assert cache.prune({2}) == 5
    assert validate_cache(folder) == [] and cache.stats().policy_versions == (2,)


def test_a_failed_append_is_cut_off_by_the_next_one(base, monkeypatch):
    folder, _ = base
    cache = TeacherCache.open(folder, identity())
    real = os.fsync

    def full(handle):
        raise OSError(28, "No space left on device")

    cache.write(batch(2, 1))
    cache.flush()
    cache.write(batch(3, 1))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MiniVerlError):
        cache.flush()
    monkeypatch.setattr(os, "fsync", real)
    cache.flush()
    assert validate_cache(folder) == [] and len(cache.ids()) == 7 and TeacherCache.open(folder).ids() == cache.ids()


def test_the_counter_of_written_bytes_outlives_prune_reopen_and_restore(base):
    folder, state = base
    cache = TeacherCache.open(folder, identity())
    start = cache.bytes_written_total
    assert start == state["bytes_written_total"]
    cache.write(batch(2))
    cache.flush()
    grown = cache.bytes_written_total
    cache.prune({2})
    assert cache.bytes_written_total > grown > start
    assert TeacherCache.open(folder).bytes_written_total == cache.bytes_written_total
    cache.restore(state)
    assert cache.bytes_written_total == start == TeacherCache.open(folder).bytes_written_total


def test_restore_without_the_files_says_what_is_lost(base, tmp_path):
    _, state = base
    cache = TeacherCache.open(tmp_path / "new", identity())
    result = cache.restore(state)
    assert (
        result.lost == tuple(t.trajectory_id for t in batch(1))
        and cache.ids() == ()
        and validate_cache(cache.path) == []
    )


def test_a_mixed_batch_goes_to_shards_of_one_version_each(tmp_path):
    cache = TeacherCache.open(tmp_path, identity(), entries_per_shard=16)
    cache.write(batch(1, 3) + batch(2, 3))
    cache.flush()
    assert [s.version for s in cache._state.shards.values()] == [1, 2]
    assert cache.prune({2}) == 3 and len(cache.ids()) == 3


# --- damage


def test_every_flipped_bit_and_every_cut_of_a_shard_is_found(base):
    folder, _ = base
    shard = sorted(folder.glob("shard-*"))[0]
    good = shard.read_bytes()
    for at in range(0, len(good), 37):
        shard.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        assert any("sha256" in p for p in validate_cache(folder)), at
        with pytest.raises(CacheError, match="sha256"):
            TeacherCache.open(folder).read("calc:0:v1")
        try:  # with the hash switched off, a damaged file may only give a wrong record or an error of ours
            TeacherCache.open(folder, verify_checksums=False).read("calc:0:v1")
        except MiniVerlError:
            pass
    for end in range(0, len(good), 53):
        shard.write_bytes(good[:end])
        assert validate_cache(folder)
        with pytest.raises(CacheError):
            TeacherCache.open(folder, verify_checksums=False).read("calc:1:v1")
    shard.write_bytes(good)
    assert validate_cache(folder) == []


def test_every_flipped_bit_of_the_index_is_found(base):
    folder, _ = base
    index = folder / "index.jsonl"
    good = index.read_bytes()
    for at in range(0, len(good) - 1, 23):
        index.write_bytes(good[:at] + bytes([good[at] ^ 2]) + good[at + 1 :])
        try:
            ids = TeacherCache.open(folder).ids()
        except MiniVerlError:
            continue
        assert len(ids) < 5  # the last line became unreadable, which is what a torn line looks like
        assert at > good[:-1].rfind(b"\n")


def test_validate_reports_every_problem(base):
    folder, _ = base
    first, second, third = sorted(folder.glob("shard-*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-5])
    third.write_bytes(third.read_bytes()[:-1] + b"\xff")
    assert len(validate_cache(folder)) == 3


def test_a_shard_is_hashed_once(base, monkeypatch):
    folder, _ = base
    import miniverl.cache.shards as shards

    calls = []
    monkeypatch.setattr(shards, "sha256_file", lambda path, real=shards.sha256_file: calls.append(path) or real(path))
    cache = TeacherCache.open(folder, identity())
    for _ in range(3):
        for name in cache.ids():
            cache.read(name)
    assert len(calls) == 3


def test_reading_needs_no_torch_and_no_safetensors(base):
    folder, _ = base
    code = (
        "import sys; from miniverl.cache.store import *; assert validate_cache(sys.argv[1]) == [];"
        "assert cache_stats(sys.argv[1]).num_trajectories == 5; assert not {'torch', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=Path(__file__).parents[1])


# --- arbitrary records


@st.composite
def shard_contents(draw):
    vocab = draw(st.sampled_from([3, 190, 256, 257, 5000]))
    k = draw(st.integers(1, min(vocab, 12)))
    entries = []
    for i in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 9))
        weights = draw(st.sampled_from([None, [0.5] * n, [float(j) for j in range(n)]]))
        first, step = draw(st.sampled_from([0, 7, 65_530])), draw(st.integers(1, 40))
        entries.append(
            targets(
                f"t{i}",
                0,
                n=n,
                k=k,
                vocab=vocab,
                weights=weights,
                seed=draw(st.integers(0, 99)),
                first=first,
                step=step,
            )
        )
    return vocab, entries, draw(st.sampled_from(["float32", "float16"]))


@settings(max_examples=60, deadline=None)
@given(shard_contents())
def test_round_trip(tmp_path_factory, drawn):
    vocab, entries, dtype = drawn
    data, names = encode_shard(entries, vocab_size=vocab, dtype=dtype)
    path = tmp_path_factory.mktemp("s") / "s.safetensors"
    path.write_bytes(data)
    reader, at = ShardReader(path, names), 0
    for entry in entries:
        back = reader.targets(at, at + len(entry), trajectory_id=entry.trajectory_id, policy_version=0, temperature=1.0)
        assert back.equals(entry, atol=0.0 if dtype == "float32" else 1e-2)
        at += len(entry)
    assert at == len(reader)


def test_float16_keeps_probabilities_to_a_thousandth(tmp_path):
    cache = TeacherCache.open(tmp_path, identity(dtype="float16", top_k=16))
    entry = targets("t", 0, n=200, k=16)
    cache.write([entry])
    cache.flush()
    back = cache.read("t")
    assert np.abs(np.exp(back.topk_log_probs) - np.exp(entry.topk_log_probs)).max() < 1e-3
    assert np.abs(np.exp(back.tail_log_prob) - np.exp(entry.tail_log_prob)).max() < 1e-3
    extreme = targets("u", 0, k=190)
    cache = TeacherCache.open(tmp_path / "exact", identity(dtype="float16", top_k=190))
    low = extreme.topk_log_probs.copy()
    low[:, -1] = -1e30
    entry = TeacherTargets(**{**extreme.__dict__, "topk_log_probs": low})
    cache.write([entry])
    cache.flush()
    back = cache.read("u")
    assert np.isfinite(back.topk_log_probs).all() and np.isneginf(back.tail_log_prob).all() and back.tail_is_exact_zero
