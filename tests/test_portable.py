"""What may leave the machine: names, and payloads without secrets and places."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import UsageError, canonical_json
from miniverl.portable import ENV, LOCAL, REDACTED, new_run_id, portable_payload, safe_name
from miniverl.schemas.config import RunConfig

SECRET_KEYS = """token hf_token hub_token access_token accessToken auth_token api_token github_token pypi_token id_token HF_TOKEN
password db_password passwd user_pwd passphrase secret client_secret SECRET_KEY credential credentials aws_credentials apikey api_key
X-API-Key openai_api_key access_key aws_secret_access_key private_key ssh_key authorization Authorization auth cookie set_cookie session
session_id bearer csrf_token tokens""".split()
BENIGN_KEYS = """tokenizer tokenizer_id tokenizer_revision tokenizer_fingerprint tokenizer_identity tokenizers token_count token_counts
max_new_tokens max_total_tokens token_ids generated_token_count selected_training_tokens num_tokens tokens_per_second token_analysis
sampled_token_nll_weight target_token_ids eos_token pad_token special_tokens token_text token_type stop_tokens segment_key key keys monkey
author authority passed name protocol_token_accuracy""".split()


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_secret_key(key):
    for value in ("plain words", ["a", "b"], {"inner": "x"}):
        assert portable_payload({key: value}) == {key: REDACTED}
    assert portable_payload({key: None, "other": ""}) == {key: None, "other": ""}


@pytest.mark.parametrize("key", BENIGN_KEYS)
def test_benign_key(key):
    for value in ("plain words", ["a", "b"], 64, [1, 2], True, None, {"inner": "x"}):
        assert portable_payload({key: value}) == {key: value}


def test_counts_under_a_token_like_key_stay_and_numbers_under_a_password_do_not():
    assert portable_payload({"token": 5, "tokens": [1, 2], "session": 3, "token_model_mask": [True]}) == {
        "token": 5, "tokens": [1, 2], "session": 3, "token_model_mask": [True]}  # fmt: skip
    assert portable_payload({"password": 1234, "api_key": [7]}) == {"password": REDACTED, "api_key": REDACTED}


SECRETS = [
    ("https://user:pa55@host.org/x", "pa55"), ("https://ghp_Abcdefgh12345678@github.com/a/b.git", "ghp_A"),
    ("postgresql+psycopg://bob:hunter2@db:5432/x", "hunter2"), ("http://h/x?page=1&access_token=abc123#top", "abc123"),
    ("GET /v1?sig=deadbeef", "deadbeef"), ("Authorization: Bearer abcDEF.123-_x", "abcDEF"), ("bearer abcdefgh", "abcdefgh"),
    ("Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"), ("ghp_0123456789abcdefABCDEF0123456789abcd", "ghp_0"), ("gho_16charsAreEnough", "gho_1"),
    ("github_pat_11ABCDEFG0abcdefghij_klmnop", "11ABC"), ("x=hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "hf_Ab"), ("hf_abcdefghijklmnopqrstuv", "hf_abc"),
    ("pypi-AgEIcHlwaS5vcmcCJDAwMDAwMDAw", "pypi-Ag"), ("sk-proj-abcdefABCDEF0123456789", "sk-proj"), ("AKIAIOSFODNN7EXAMPLE", "AKIA"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "eyJh"), ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----", "MIIE"),
    ("-----BEGIN PRIVATE KEY-----\nMIIEtruncated", "MIIE"), ("password=hunter2, retry", "hunter2"), ("api_key: abcd1234", "abcd1234"),
    ("HF_TOKEN=abc", "abc"),
]  # fmt: skip
WRAPS = ["{}", "see {} now", "({})", '"{}"', "x\n{}\ny", "a: {},", "[{}]"]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secret_in_text(text, secret):
    for wrap in WRAPS:
        shown = portable_payload({"log": [wrap.format(text)]})["log"][0]
        assert secret not in shown and REDACTED in shown, shown


PLACES = [
    ("/home/alice/work/run.json", "run.json"), ("/srv/alice/data/", "data"), ("/Users/alice", "~"), ("/home/alice/", "~"), ("C:\\alice\\x\\a.txt", "a.txt"),
    ("d:/alice/b.txt", "b.txt"), ("C:\\Users\\alice", "~"), ("\\\\alice\\share\\c.bin", "c.bin"), ("file:///srv/alice/d.txt", "d.txt"),
    ("file://alice/share/e.txt", "e.txt"), ("~alice/f.txt", "f.txt"), ("~/alice/g.txt", "g.txt"), ("/mnt/c/Users/alice", "~"),
    ("\\\\?\\C:\\alice\\h.txt", "h.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "base"), PLACES)
def test_place(text, base):
    for wrap in WRAPS:
        shown = portable_payload(wrap.format(text))
        assert "alice" not in shown and f"{LOCAL}/{base}" in shown, shown
    assert portable_payload(text) == f"{LOCAL}/{base}" or text.startswith("\\\\?")


def test_places_of_other_kinds():
    assert portable_payload("/srv/My Documents/a b.txt") == f"{LOCAL}/a b.txt"
    assert portable_payload(Path("/srv/x/y")) == portable_payload(PurePosixPath("/srv/x/y")) == f"{LOCAL}/y"
    assert portable_payload("/") == "/" and portable_payload("/tmp") == f"{LOCAL}/tmp"
    assert portable_payload("PATH=/usr/alice/bin:/opt/alice/bin") == f"PATH={LOCAL}/bin:{LOCAL}/bin"
    for text in ("$HOME/alice/x", "${HOME}/alice/x", "%USERPROFILE%\\alice\\x", "$env:HOME/alice/x"):
        assert portable_payload(text) == f"{ENV}/x"
    assert portable_payload("key is ${oc.env:HF_TOKEN} or $HF_TOKEN") == f"key is {ENV} or {ENV}"


KEPT = [
    "Qwen/Qwen3-0.6B", "runs/demo", "./a/b/c", "../x/y", "and/or", "12 / 3", "(4/2)/1", "</final>", "<tool_call>\n{}\n</tool_call>", "2024-01-02T03:04:05Z",
    "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "50% of 20%", "costs $5", "a $x b", "km/h", "w:\n x", "token", "risk-free", "hf_transfer",
    "Bearer of news", "x ~ y/z", "1e-4", "ratio 3:4", "task-0001:v3:s12", "I/O", "gh-pages",
]  # fmt: skip


@pytest.mark.parametrize("text", KEPT)
def test_kept(text):
    assert portable_payload({"x": text}) == {"x": text}


def test_keys_are_cleaned_and_never_lost():
    shown = portable_payload({"/home/al/a/k": 1, "/home/bo/b/k": 2, "k": 3, "<local>/k#2": 4})
    assert sorted(shown.values()) == [1, 2, 3, 4] and not any("home" in key for key in shown)


def test_a_configuration_stays_readable():
    config = RunConfig.from_mapping({"models": {"student": {}, "teacher": {}}})
    assert portable_payload(config.to_mapping()) == config.to_mapping()


def test_the_original_is_not_touched():
    record = {"password": "x", "list": ["/srv/a/b"], "tuple": (1, "a")}
    shown = portable_payload(record)
    assert record == {"password": "x", "list": ["/srv/a/b"], "tuple": (1, "a")} and shown["tuple"] == [1, "a"]


TEXT = st.text(max_size=30) | st.text(alphabet="abC1/\\:~$%{}@?&=<>. -_#\n", max_size=40)
RECORD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT | st.sampled_from([t for t, _ in SECRETS + PLACES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.sampled_from(SECRET_KEYS + BENIGN_KEYS), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(RECORD)
def test_twice_is_once_and_the_result_is_json(record):
    shown = portable_payload(record)
    assert portable_payload(shown) == shown and canonical_json(shown)


@settings(max_examples=200, deadline=None)
@given(
    before=st.text(alphabet=" \n\"'=(:,[>|;", max_size=3),
    parts=st.lists(st.text(alphabet="abcXYZ019._-+@é", min_size=1, max_size=8).filter(lambda p: p.strip(".")), min_size=1, max_size=3),
    last=st.text(alphabet="abc019", min_size=1, max_size=5),
    style=st.sampled_from(["posix", "windows", "forward", "share"]),
)  # fmt: skip
def test_no_folder_of_an_absolute_path_is_left(before, parts, last, style):
    head, joint = {
        "posix": ("/", "/"),
        "windows": ("C:\\", "\\"),
        "forward": ("Q:/", "/"),
        "share": ("\\\\srv\\", "\\"),
    }[style]
    folders = [f"secretive{part}" for part in parts]
    shown = portable_payload(f"{before}{head}{joint.join([*folders, last])} rest of the text")
    assert "secretive" not in shown, shown


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_safe_name_cannot_escape(text):
    try:
        name = safe_name(text)
    except UsageError:
        assert not re.search(r"[A-Za-z0-9]", text)
        return
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and ".." not in name and len(name) <= 120
    assert Path("out", name).resolve().parent == Path("out").resolve() and safe_name(name) == name
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}-[a-z0-9][a-z0-9-]*", new_run_id(text))
