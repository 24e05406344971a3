"""A policy's fields: what is refused and how, and that both written forms read back the same."""

import inspect
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FIELDS = (
    "capacity, fair, group_reduce, keep_ratio, kernel_size, later_turns, pooling, protect, "
    "window_size"
)


def snapkv(**fields):
    from kvcompress import SnapKVPolicy

    return SnapKVPolicy(**fields)


def config_error(*parts):
    """Expect our error, of all three kinds, with every part in its message."""
    from kvcompress import KVCompressError, PolicyConfigError

    assert issubclass(PolicyConfigError, KVCompressError)
    assert issubclass(PolicyConfigError, ValueError)
    return pytest.raises(PolicyConfigError, match=".*".join(map(re.escape, parts)))


REFUSED = {
    "window fills capacity": (
        {"capacity": 64, "window_size": 64},
        ["window_size=64", "smaller than capacity=64", "capacity > 64", "window_size < 64"],
    ),
    "default window fills capacity": (
        {"capacity": 32},
        ["window_size=32", "smaller than capacity=32"],
    ),
    "window fills one layer's capacity": (
        {"capacity": (64, 20), "window_size": 20},
        ["window_size=20", "smaller than capacity=20"],
    ),
    "one layer's window fills capacity": (
        {"capacity": 64, "window_size": (8, 70)},
        ["window_size=70", "smaller than capacity=64"],
    ),
    "window over capacity in the same layer": (
        {"capacity": (40, 20), "window_size": (10, 30)},
        ["window_size=30", "smaller than capacity=20"],
    ),
    "even kernel": ({"kernel_size": 4}, ["kernel_size=4", "must be odd", "3 or 5"]),
    "even kernel in a list": (
        {"kernel_size": (5, 6)},
        ["kernel_size=(5, 6)", "must be odd", "5 or 7"],
    ),
    "kernel of two": ({"kernel_size": 2}, ["kernel_size=2", "must be odd", "1 or 3"]),
    "no capacity": ({"capacity": 0}, ["capacity=0", "greater than or equal to 1"]),
    "negative capacity": ({"capacity": -3}, ["capacity=-3", "greater than or equal to 1"]),
    "capacity is text": ({"capacity": "many"}, ["capacity='many'", "valid integer"]),
    "nothing kept": ({"keep_ratio": 0}, ["keep_ratio=0", "greater than 0"]),
    "more than all kept": ({"keep_ratio": 1.5}, ["keep_ratio=1.5", "less than or equal to 1"]),
    "two budgets": (
        {"capacity": 64, "keep_ratio": 0.5},
        ["capacity=64", "keep_ratio=0.5", "give one"],
    ),
    "two budgets, one the default": (
        {"capacity": 2048, "keep_ratio": 0.5},
        ["capacity=2048", "keep_ratio=0.5", "give one"],
    ),
    "unknown pooling": ({"pooling": "median"}, ["pooling='median'", "'avg', 'max' or 'none'"]),
    "unknown reduction": (
        {"group_reduce": "min"},
        ["group_reduce='min'", "'mean', 'max' or 'sum'"],
    ),
    "unknown later turns": (
        {"later_turns": "forget"},
        ["later_turns='forget'", "'revote', 'append' or 'keep'"],
    ),
    "misspelt field": (
        {"capacty": 64},
        ["no field 'capacty'", "Did you mean 'capacity'?", FIELDS],
    ),
    "unknown field": ({"zzz": 64}, ["no field 'zzz'. Fields: ", FIELDS]),
    "lists of two lengths": (
        {"capacity": (64, 64), "window_size": (8, 8, 8)},
        ["capacity lists 2 layers", "window_size 3", "one value for each layer"],
    ),
}


@pytest.mark.parametrize(("fields", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(fields, parts):
    from kvcompress import policy_from

    with config_error("SnapKVPolicy: ", *parts):
        snapkv(**fields)
    with config_error("SnapKVPolicy: ", *parts):
        policy_from({"policy": "snapkv", **fields})
    kept = {"keep_ratio": None} if "keep_ratio" in fields else {}
    with config_error("SnapKVPolicy: ", *parts):
        snapkv(**kept).model_copy(update=fields)


def test_all_faults_are_told_at_once():
    with config_error("SnapKVPolicy: ", "capacity=0", "kernel_size=4", "pooling='sum'"):
        snapkv(capacity=0, kernel_size=4, pooling="sum")


@pytest.mark.parametrize(
    "fields",
    [
        {"capacity": 33},
        {"capacity": 2, "window_size": 1},
        {"capacity": (33, 100)},
        {"capacity": 64, "window_size": (8, 63)},
        {"capacity": (64, 20), "window_size": (40, 19)},
        {"keep_ratio": 1},
        {"keep_ratio": 0.001, "window_size": 64},
        {"keep_ratio": 0.5, "capacity": None},
        {"kernel_size": 1},
        {"kernel_size": (1, 3)},
    ],
)
def test_accepted(fields):
    policy = snapkv(**fields)
    assert {name: getattr(policy, name) for name in fields} == fields


def test_defaults():
    policy = snapkv()
    assert policy.model_dump() == {
        "capacity": 2048,
        "keep_ratio": None,
        "later_turns": "revote",
        "protect": (),
        "fair": (),
        "window_size": 32,
        "kernel_size": 5,
        "pooling": "avg",
        "group_reduce": "mean",
    }
    assert snapkv(capacity=None) == snapkv(keep_ratio=None) == policy
    assert snapkv(keep_ratio=0.5).capacity is None


@pytest.mark.parametrize("name", ["capacity", "window_size", "kernel_size"])
def test_lists_must_fit_the_model(name):
    value = {"capacity": [64, 65], "window_size": [3, 4], "kernel_size": [5, 7]}[name]
    policy = snapkv(**{name: value})
    policy.check_layers(2)
    for layers in (1, 3):
        with config_error(
            f"snapkv: {name} lists 2 values", f"{layers} full-attention", f"one value, or {layers}"
        ):
            policy.check_layers(layers)
    snapkv().check_layers(3)


def test_a_list_of_one_is_not_one_value_for_all():
    with config_error("snapkv: capacity lists 1 values", "2 full-attention layers"):
        snapkv(capacity=[64]).check_layers(2)
    snapkv(capacity=[64]).check_layers(1)


def test_lists_are_checked_before_anything_is_kept():
    import torch

    from kvcompress.testing import kept_positions, scores

    rows = torch.randn(1, 2, 40, 4)
    for function in (kept_positions, scores):
        with config_error("snapkv: window_size lists 2 values", "3 full-attention layers"):
            function(snapkv(window_size=[8, 8]), rows, rows, rows, layer_idx=0, num_layers=3)


@pytest.mark.parametrize("name", ["capacity", "window_size", "kernel_size"])
def test_an_empty_list_is_refused(name):
    with config_error("SnapKVPolicy: ", f"{name}=()"):
        snapkv(**{name: ()})


def test_frozen():
    from pydantic import ValidationError

    policy = snapkv(capacity=64)
    with pytest.raises(ValidationError, match="frozen"):
        policy.capacity = 128
    assert policy.capacity == 64
    with pytest.raises(ValidationError, match="frozen"):
        del policy.capacity


def test_equal_values_hash_alike_and_lists_become_tuples():
    listed, tupled = snapkv(capacity=[64, 65]), snapkv(capacity=(64, 65))
    assert listed == tupled and hash(listed) == hash(tupled)
    assert isinstance(listed.capacity, tuple)
    assert len({listed, tupled, snapkv(capacity=64), snapkv(capacity=65)}) == 3


def test_copy_replaces_and_validates():
    policy = snapkv(capacity=64, window_size=16)
    copy = policy.model_copy(update={"capacity": 128, "pooling": "max"})
    assert copy == snapkv(capacity=128, window_size=16, pooling="max")
    assert policy == snapkv(capacity=64, window_size=16)
    assert policy.model_copy() == policy
    with config_error("SnapKVPolicy: ", "window_size=64", "smaller than capacity=64"):
        policy.model_copy(update={"window_size": 64})
    with config_error("no field 'windw_size'", "Did you mean 'window_size'?"):
        policy.model_copy(update={"windw_size": 8})


def test_copy_changes_the_kind_of_budget():
    absolute, relative = snapkv(capacity=64, kernel_size=7), snapkv(keep_ratio=0.5, kernel_size=7)
    assert absolute.model_copy(update={"keep_ratio": 0.5}) == relative
    assert relative.model_copy(update={"capacity": 64}) == absolute
    assert relative.model_copy(update={"pooling": "max"}).keep_ratio == 0.5
    with config_error("capacity=64", "keep_ratio=0.5", "give one"):
        relative.model_copy(update={"capacity": 64, "keep_ratio": 0.5})


@pytest.mark.parametrize(
    ("prompt", "ratio", "window", "rows"),
    [
        (100, 0.5, 8, 50),
        (101, 0.5, 8, 50),
        (100, 1.0, 8, 100),
        # In floating point 0.29 * 100 is 28.999999999999996 and 0.1 * 3 more than 0.3.
        (100, 0.29, 8, 29),
        (30, 0.1, 1, 3),
        (29, 0.1, 1, 2),
        (20, 0.3, 8, 9),
        (9, 0.1, 8, 9),
    ],
)
def test_budget_of_a_ratio(prompt, ratio, window, rows):
    assert snapkv(keep_ratio=ratio, window_size=window).budget(prompt, 0, 1) == rows


def test_budget_of_a_capacity():
    policy = snapkv(capacity=[64, 48], window_size=[8, 9])
    assert [policy.budget(1000, layer, 2) for layer in (0, 1)] == [64, 48]
    assert [policy.protected_tokens(layer, 2) for layer in (0, 1)] == [8, 9]
    assert [policy.query_tokens(layer, 2) for layer in (0, 1)] == [8, 9]
    assert snapkv(capacity=64).budget(10, 5, 6) == 64


def per_layer(values, layers):
    """One value, or a tuple with one for each layer."""
    return st.one_of(values, st.tuples(*[values] * layers))


@st.composite
def fields(draw):
    layers = draw(st.integers(1, 4))
    made = {
        "window_size": draw(per_layer(st.integers(1, 64), layers)),
        "kernel_size": draw(per_layer(st.integers(0, 20).map(lambda half: 2 * half + 1), layers)),
        "pooling": draw(st.sampled_from(["avg", "max", "none"])),
        "group_reduce": draw(st.sampled_from(["mean", "max", "sum"])),
        "later_turns": draw(st.sampled_from(["revote", "append", "keep"])),
    }
    if draw(st.booleans()):
        made["keep_ratio"] = draw(st.floats(0, 1, exclude_min=True))
    else:
        made["capacity"] = draw(per_layer(st.sampled_from([65, 100, 2048, 10**9]), layers))
    return {name: made[name] for name in made if draw(st.booleans())}


@settings(deadline=None, max_examples=300)
@given(fields())
def test_written_forms_read_back(values):
    from kvcompress import policy_from

    policy = snapkv(**values)
    for name, value in values.items():
        assert getattr(policy, name) == value
    text, form = policy.to_string(), policy.to_dict()
    assert policy_from(text) == policy_from(form) == policy_from(policy) == policy
    assert policy_from(text).to_string() == text == str(policy)
    assert policy_from(form).to_dict() == form
    assert re.fullmatch(r"[a-z0-9_:=./-]+", text)

    assert json.loads(json.dumps(form)) == form
    # Canonical: exactly the fields that differ from the defaults, in both forms.
    plain = snapkv()
    changed = {name: value for name, value in policy if name != "capacity" or not policy.keep_ratio}
    changed = {name for name, value in changed.items() if value != getattr(plain, name)}
    assert set(form) - {"policy"} == changed
    assert {part.partition("=")[0] for part in text.split(":")[1:]} == changed


@pytest.mark.parametrize(
    ("values", "text", "form"),
    [
        ({}, "snapkv", {}),
        ({"capacity": 2048, "pooling": "avg"}, "snapkv", {}),
        ({"capacity": 512}, "snapkv:capacity=512", {"capacity": 512}),
        ({"capacity": (512, 256)}, "snapkv:capacity=512/256", {"capacity": [512, 256]}),
        ({"capacity": (512,)}, "snapkv:capacity=512/", {"capacity": [512]}),
        ({"keep_ratio": 0.25}, "snapkv:keep_ratio=0.25", {"keep_ratio": 0.25}),
        ({"pooling": "none"}, "snapkv:pooling=none", {"pooling": "none"}),
        (
            {"pooling": "max", "capacity": 64, "kernel_size": 7},
            "snapkv:capacity=64:kernel_size=7:pooling=max",
            {"capacity": 64, "kernel_size": 7, "pooling": "max"},
        ),
    ],
)
def test_canonical_forms(values, text, form):
    policy = snapkv(**values)
    assert policy.to_string() == text
    assert policy.to_dict() == {"policy": "snapkv", **form}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("snapkv:capacity=none", {}),
        ("snapkv:keep_ratio=none:capacity=64", {"capacity": 64}),
        ("  snapkv:capacity=64\n", {"capacity": 64}),
        ("snapkv:pooling=none:kernel_size=3/5", {"pooling": "none", "kernel_size": (3, 5)}),
        ("snapkv:keep_ratio=1e-05", {"keep_ratio": 1e-5}),
    ],
)
def test_strings_that_are_not_canonical(text, values):
    from kvcompress import policy_from

    assert policy_from(text) == snapkv(**values)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("snapkv:foo", ["'foo'", "'snapkv:foo'", "name:field=value"]),
        ("snapkv:capacity", ["'capacity'", "'snapkv:capacity'", "name:field=value"]),
        ("snapkv:", ["''", "'snapkv:'", "name:field=value"]),
        ("snapkv:=64", ["'=64'", "name:field=value"]),
        ("snapkv:capacity=1:capacity=2", ["'capacity' is given twice"]),
        ("snapkv+tova+h2o", ["'snapkv+tova+h2o'", "composes 3 policies"]),
        ("snapkv+h2o:scope=all:scope=all", ["'scope' is given twice"]),
        ("snapkv:capacity=", ["capacity=''", "valid integer"]),
        ("snapkv:window_size=none", ["window_size='none'", "valid integer"]),
        ("snapkv:capacty=64", ["no field 'capacty'", "Did you mean 'capacity'?"]),
        ({}, ["under 'policy'", "{}"]),
        ({"capacity": 64}, ["under 'policy'", "{'capacity': 64}"]),
        ({"policy": 5}, ["under 'policy'", "{'policy': 5}"]),
    ],
    ids=repr,
)
def test_malformed(spec, parts):
    from kvcompress import policy_from

    with config_error(*parts):
        policy_from(spec)


@pytest.mark.parametrize("spec", [64, None, ["snapkv"]], ids=repr)
def test_neither_instance_nor_string_nor_dict(spec):
    from kvcompress import policy_from

    # Below the type check that runs in tests only.
    with config_error("as an instance", "'snapkv:capacity=512'", f"got {spec!r}"):
        inspect.unwrap(policy_from)(spec)


@pytest.mark.parametrize("spec", ["", "  ", ":capacity=64", "nothing_like_it", "SnapKV2000x"])
def test_unknown_policy(spec):
    from kvcompress import KVCompressError, UnknownPolicyError, policy_from

    with pytest.raises(
        UnknownPolicyError, match=r"No policy named .*Installed: .*snapkv"
    ) as caught:
        policy_from(spec)
    assert isinstance(caught.value, KVCompressError)
    assert "Did you mean" not in str(caught.value)
    assert repr(spec.strip().split(":")[0]) in str(caught.value)


@pytest.mark.parametrize("spec", ["snapvk", "snap_kv:capacity=64", {"policy": "snapk"}], ids=repr)
def test_misspelt_policy(spec):
    from kvcompress import UnknownPolicyError, policy_from

    with pytest.raises(UnknownPolicyError, match=r"Did you mean 'snapkv'\? Installed: .*snapkv"):
        policy_from(spec)


def test_a_form_is_not_changed_by_reading_it():
    from kvcompress import policy_from

    form = {"policy": "snapkv", "capacity": [64, 65]}
    assert policy_from(form) == snapkv(capacity=(64, 65))
    assert form == {"policy": "snapkv", "capacity": [64, 65]}
